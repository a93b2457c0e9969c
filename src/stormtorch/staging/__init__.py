"""Between a GPU and the network: copies to pinned memory, the order in which collectives start, waiting threads.

Used by the backend and the runtime. Begin with `order.py`.
"""
