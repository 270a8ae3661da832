"""The few errors slimkv raises. Each also derives from the builtin that a caller would expect."""


class SlimKVError(Exception):
    """Base of every error raised on purpose by slimkv."""


class SpecError(SlimKVError, ValueError):
    """A format name, width, head size or page size that slimkv does not support."""


class InputError(SlimKVError, ValueError):
    """A tensor whose shape, dtype, device or contents an operation does not accept."""


class UnsupportedError(SlimKVError, NotImplementedError):
    """A combination that is valid but that the chosen implementation does not handle."""


class MissingDependencyError(SlimKVError, ImportError):
    """A requested feature needs a package that is missing or too old."""


class CorruptDataError(SlimKVError, RuntimeError):
    """Stored bytes that cannot have been written by slimkv."""


class FidelityError(SlimKVError, RuntimeError):
    """Attention scores from stored keys are so far from the exact ones that answers would be wrong."""


class OutOfPagesError(SlimKVError, RuntimeError):
    """A pool has no free page left."""
