"""Reports: one self-contained HTML page from the JSON results of commands. Start with `page.py`."""
