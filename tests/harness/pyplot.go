package harness

// Pyplot is a Python module with the part of matplotlib.pyplot that interpreters use for figures.
const Pyplot = `import os
open = {}
class Figure:
    def savefig(self, file, format): file.write(f"{format} by {os.environ['MPLBACKEND']}".encode())
def figure(number): return open.setdefault(number, Figure())
def get_fignums(): return sorted(open)
def close(figure):
    for n in [n for n in open if open[n] is figure]: del open[n]
`
