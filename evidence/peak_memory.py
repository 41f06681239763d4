"""The beginning of a program that runs in a process of its own and tells how much memory it took.

A thread looks at the resident set all the while. What the program imports here counts in `before`; at its end it sets
`done`, and took `peak - before` bytes.
"""

WATCHED = """
import json, sys, psutil, torch
from pathlib import Path
import threading, time
process, peak, done = psutil.Process(), 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.005)
before = process.memory_info().rss
threading.Thread(target=watch, daemon=True).start()
"""
