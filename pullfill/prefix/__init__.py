"""Which decode worker holds which blocks of a prompt.

A decode worker numbers the blocks that it stores and removes and keeps the last events (`ring`). A
frontend follows the events of each decode worker (`replica`) and keeps the blocks of all of them in
one `index`. `chain` names a block by the tokens up to its end. `predicted` remembers where prompts
went whose blocks are not stored yet.

Nothing here does I/O, takes a lock or knows vLLM. Each object belongs to one thread.
"""
