"""Octavo inside other engines. A plug-in renames and calls; it imports its engine only when that engine calls it."""
