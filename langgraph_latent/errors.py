"""Every error of the library proper; the command line and the demo add one each. It knows nothing but names.

LatentError
├── ModelLoadError        the model's name, folder or files are unusable
├── UnsupportedLayerError a cache layer kind that KVState cannot hold yet
├── PromptError           the messages can't become a prompt
│   ├── TemplateError     the chat template is missing or refuses the messages
│   └── ContextLengthError the prompt is longer than the model's maximum
├── HandleError           the handle is malformed, altered or not a handle
│   ├── UnknownHandleError an id this workspace no longer remembers
│   ├── TenantError       the handle belongs to another tenant
│   └── ModelMismatchError the handle belongs to another model
├── CodecError            a cache file or byte string that fails verification
├── RouteError            the edge's policy allows no route that works
├── CacheBudgetError      one cache is larger than the whole budget
├── QueueFullError        more requests are under way on the model than the caller puts up with
├── RequestTimeoutError   a request was not done in its time
├── RequestCancelledError whoever asked has gone
├── IntegrityError        the pool's books do not add up
├── ClosedError           the workspace or chat model was closed
├── MissingExtraError     an optional package is not installed
└── ConfigError           an option that does not exist or has an impossible value
"""

from langgraph_latent import public


@public
class LatentError(Exception):
    """Root of the tree: catch this to catch everything the library raises on purpose."""


class ModelLoadError(LatentError):
    """The model's name, folder or files are unusable."""


class UnsupportedLayerError(LatentError):
    """The model has a cache layer of a kind that `KVState` cannot hold."""


class PromptError(LatentError):
    """The messages can't become a prompt."""


class TemplateError(PromptError):
    """The chat template is missing or refuses these messages."""


class ContextLengthError(PromptError):
    """The prompt is longer than the model's maximum."""


class HandleError(LatentError):
    """The handle is malformed, was altered, or is not a handle."""


class UnknownHandleError(HandleError):
    """The workspace does not remember this id."""


class TenantError(HandleError):
    """The handle belongs to another tenant."""


class ModelMismatchError(HandleError):
    """The handle belongs to another model."""


class CodecError(LatentError):
    """A cache file or byte string failed verification; nothing of it was used."""


class RouteError(LatentError):
    """The edge's policy allows no route that works."""


class CacheBudgetError(LatentError):
    """One cache is larger than the workspace's whole memory budget."""


class QueueFullError(LatentError):
    """More requests are under way on the model than `max_queue` allows; nothing was computed."""


class RequestTimeoutError(LatentError, TimeoutError):
    """A request was not done in its time."""


class RequestCancelledError(LatentError):
    """Whoever asked has gone: nobody sees this but the thread that worked for them."""


class IntegrityError(LatentError):
    """The pool's books do not add up; this is a bug in the library."""


class ClosedError(LatentError):
    """The workspace or chat model was closed."""


class MissingExtraError(LatentError, ImportError):
    """What was asked for needs an optional package; the message says which extra to install."""


class ConfigError(LatentError):
    """An option that does not exist or has an impossible value."""
