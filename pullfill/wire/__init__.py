"""Every struct that crosses a process boundary (docs/wire.md describes each).

`workers`: what two workers say to each other, the job on the queue first. `records`: what etcd
keeps and people read. `prefix`: what a decode worker says of its prefix cache. `codec`: how all of
them are encoded. What else a frontend and a decode worker say to each other is in
`engine/front_wire.py`, since it carries vLLM's own structs.
"""

from pullfill.wire.codec import *  # noqa: F403
from pullfill.wire.prefix import *  # noqa: F403
from pullfill.wire.records import *  # noqa: F403
from pullfill.wire.workers import *  # noqa: F403
