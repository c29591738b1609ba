"""Serving many requests at once: blocks of cached keys and values, the scheduler, the engine, the HTTP API."""
