"""Which course a forward pass took, as far as that can be seen without looking at what it does.

Rows may begin to move for reasons that no setting of a model shows: a global variable, a hook, a
method that was replaced, a counter. Autograd mostly makes another number of nodes then, or
``torch.compile`` another graph, and both are counted anyway.

A pass also takes a new course where it is the first to change something that modules hold; see
:mod:`opacus.core.record.changes`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from opacus.core.platform.torch_internals import number_of_graphs, number_of_nodes
from opacus.core.record.changes import Changes, Start

# Courses of one structure of inputs that are told apart; if there are more, it depends on sizes
# or data, and says nothing.
MOST_COURSES = 8
# Structures that are told apart.
MOST_STRUCTURES = 4096

# A structure of inputs with a manner, and so many nodes.
Taken = tuple[Hashable, int]


class Course:
    """Notices forward passes that take another course than those before.

    Args:
        changes: Notices what passes change.

    Attributes:
        new: Whether the latest one did, on inputs whose structure was known, unless following it
            has shown all that it did; or it was the first to change something.
        taken: The latest one's, ``None`` if it is not told apart.
        compiled: Whether graphs were made in it, which took longer than any check of it.
    """

    def __init__(self, changes: Changes | None = None) -> None:
        self._changes = changes
        self.new = self.compiled = False
        self.taken: Taken | None = None
        self._known: dict[Hashable, set[int]] = {}
        self._key: Hashable = None
        self._nodes = self._graphs = 0

    def expect(self, key: Hashable) -> None:
        """A forward pass will run, on inputs of this structure; ``None`` if it does not count."""
        self.new, self.compiled, self.taken = False, False, None
        self._key = key

    def begin(self, model: nn.Module | None = None) -> None:
        """Now it does; ``model``: what of this is recorded."""
        if torch.compiler.is_compiling():
            self._key = None
            return
        if model is not None and self._changes is not None:
            self._changes.begin(model)
        self._nodes, self._graphs = number_of_nodes(), number_of_graphs()

    @property
    def changed(self) -> Start | None:
        """What the latest pass was the first to change of what modules hold, as it was before."""
        return None if self._changes is None else self._changes.start

    def end(
        self,
        manner: Hashable = None,
        *,
        followed: bool,
        looked: bool = False,
        several: bool = True,
    ) -> None:
        """It has come through.

        Args:
            manner: In another one layers make other nodes for the same.
            followed: Whether whose rows layers had in it was looked at.
            looked: Whether the program looked at values in it then: they may have chosen the
                course, which following it does not show.
            several: Whether it had several samples, so that what depends on them can be found out.
        """
        self._count(manner, followed, looked)
        if self._changes is not None and self._changes.end(counts=several):
            self.new = True

    def _count(self, manner: Hashable, followed: bool, looked: bool) -> None:
        structure, self._key = self._key, None
        if structure is None or torch.compiler.is_compiling():
            return
        key = structure, manner
        made, known = number_of_nodes() - self._nodes, self._known.get(key)
        self.compiled = number_of_graphs() > self._graphs
        self.taken = key, made
        if known is None:
            if len(self._known) < MOST_STRUCTURES:
                self._known[key] = {made}
        elif self.compiled or len(known) <= MOST_COURSES:
            self.new = (self.compiled or made not in known) and (looked or not followed)
            known.add(made)

    def forget(self, taken: Taken | None) -> None:
        """What took this course was refused: it is another one again when it is next taken."""
        if taken is not None:
            self._known.get(taken[0], set()).discard(taken[1])

    def __getstate__(self) -> dict[str, Any]:
        return vars(Course(None if self._changes is None else Changes()))
