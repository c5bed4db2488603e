"""Drafting on a device, with uncertain blocks verified by a remote target (UGSD).

    server   mmspec.edge.serve(model, token)                         the target, on another machine
    device   fast = mmspec.edge.connect(small, "http://...", token)  then fast.generate(...)

The server needs the extra `[edge]`; the device needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmspec._attributes import attach_lazily

if TYPE_CHECKING:
    from mmspec.edge.device import connect as connect
    from mmspec.edge.device import link_of as link_of
    from mmspec.edge.service import serve as serve

__getattr__, __dir__ = attach_lazily(
    __name__,
    {
        **dict.fromkeys(("connect", "link_of"), "mmspec.edge.device"),
        **dict.fromkeys(("serve",), "mmspec.edge.service"),
    },
)
