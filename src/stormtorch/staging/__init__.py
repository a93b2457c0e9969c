"""Staging between GPU and network: copies to pinned memory, the launch queue of collectives, background threads.

Used by the backend and the runtime. Begin with `launch_queue.py`.
"""
