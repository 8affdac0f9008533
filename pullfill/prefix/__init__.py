"""Which decode worker holds which blocks of a prompt.

A decode worker numbers the blocks that it stores and removes, and a frontend follows these events
of each decode worker (`events`). The frontend keeps the blocks of all of them, and where prompts
went whose blocks are not stored yet, in an `index`. `chain` names a block by the tokens up to its
end.

Nothing here does I/O, takes a lock or knows vLLM. Each object belongs to one thread.
"""
