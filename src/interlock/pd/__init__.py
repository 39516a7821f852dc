"""Prefill in one process, decode in another: the processes, their messages, and the course of a request through both."""
