"""The embedded default: continuous batching of Transformers models over Octavo's pages, in one process."""
