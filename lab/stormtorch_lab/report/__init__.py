"""Reports: one self-contained HTML page from the JSON that commands write. Begin with `page.py`."""
