"""The version of tmoe, for those that may not import all of it."""

__version__ = "0.1.0"
