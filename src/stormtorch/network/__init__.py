"""What networks do to datagrams: loss models, fault injection, files of links, and units of rates, sizes and times.

Models only: anything above may use them. Begin with `loss.py`.
"""
