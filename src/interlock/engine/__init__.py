"""The life of requests and blocks: scheduler, block pool, prefix cache, engine core, `LLM`."""
