"""A small model here, its target elsewhere: blocks that the small one is unsure of are sent (UGSD).

    server   mmspec.edge.serve(model, token)                         the target, on its own machine
    device   fast = mmspec.edge.connect(small, "http://...", token)  then fast.generate(...) as ever

Needs the extra `[edge]` where it serves; a device needs nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmspec._lazy import lazy

if TYPE_CHECKING:
    from mmspec.edge.device import connect as connect
    from mmspec.edge.device import link_of as link_of
    from mmspec.edge.service import serve as serve

__getattr__, __dir__ = lazy(
    __name__,
    {
        **dict.fromkeys(("connect", "link_of"), "mmspec.edge.device"),
        **dict.fromkeys(("serve",), "mmspec.edge.service"),
    },
)
