"""Where caches are kept and found: tensors under token prefixes, within a byte budget. Nothing here knows text or graphs."""
