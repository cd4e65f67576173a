"""Modules that every package may use: errors that a user can act on, files, and properties of this machine."""
