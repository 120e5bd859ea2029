"""Where caches are kept and found: states under token prefixes, within a byte budget. Nothing here knows text."""
