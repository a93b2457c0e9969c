"""Models of what networks do to datagrams: loss, faults, files of links, and units of rates, sizes and times."""
