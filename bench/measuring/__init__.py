"""What bench/cpu.py is made of.

work.py       what every engine is asked: token ids from a seed
machine.py    who used the cores, how much memory a process tree holds, the machine's own limits
processes.py  engines as processes: started, paused while others have their turn, ended
client.py     streaming HTTP load that costs next to nothing
engines.py    Baton and its peers: how each is started
cases.py      one measurement of one engine: decode, prefill, batch, HTTP, neighbour, growth, memory
figures.py    medians, fits, and what the steps of a driver say
goals.py      the goals of the CPU, and the tables
"""
