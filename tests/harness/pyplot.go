package harness

// Pyplot is a module with the interface of matplotlib.pyplot, as far as interpreters use it for figures.
const Pyplot = `import os
open = {}
class Figure:
    def savefig(self, file, format): file.write(f"{format} by {os.environ['MPLBACKEND']}".encode())
def figure(number): return open.setdefault(number, Figure())
def get_fignums(): return sorted(open)
def close(figure):
    for n in [n for n in open if open[n] is figure]: del open[n]
`
