"""Rows by user: the items of the data set are the users, so Poisson sampling draws users.

With ``make_private(privacy_unit="unit_ids")`` the rows of a user are clipped together, and epsilon
holds for adding or removing a user with all rows::

    users = UserDataset(rows, user_of_row, most_rows=16)
    loader = DataLoader(users, batch_size=64, collate_fn=UserCollate())  # 64 users
    for x, y, unit_ids in private_loader:
        criterion(model(x, unit_ids=unit_ids), y).backward()
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

Row = tuple[int, Any]  # number of its user, and what the data set of rows has


class UserDataset(Dataset[list[Row]]):
    """A data set whose item is a user: a list of rows, each with the number of its user.

    Guarantee: item u holds rows of user u alone, at most `most_rows`.

    Args:
        dataset: map-style data set of rows.
        users: the user of each row, in order: numbers, names, or a tensor `[rows]`.
        most_rows: limit for a user; of more rows a uniform subset is drawn anew each time that the
            user is drawn. It bounds memory; clipping bounds the user's contribution.

    Attributes:
        names: who the users are, in the order of the items.

    Raises:
        ValueError: `users` is not one for each row, or `most_rows` is below 1.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        users: Iterable[Hashable] | Tensor,
        *,
        most_rows: int | None = None,
    ) -> None:
        of_rows = users.tolist() if isinstance(users, Tensor) else list(users)
        size = len(dataset)  # type: ignore[arg-type]
        if len(of_rows) != size:
            raise ValueError(
                f"users must name the user of each of the {size} rows of the data set, got "
                f"{len(of_rows)} names"
            )
        if most_rows is not None and most_rows < 1:
            raise ValueError(f"most_rows must be at least 1, got {most_rows!r}")
        self.dataset, self.most_rows = dataset, most_rows
        rows: dict[Hashable, list[int]] = {}
        for row, user in enumerate(of_rows):
            rows.setdefault(user, []).append(row)
        self.names, self._rows = list(rows), list(rows.values())

    def __len__(self) -> int:
        """Number of users."""
        return len(self._rows)

    def rows_of(self, user: int) -> list[int]:
        """Numbers of all rows of a user."""
        return list(self._rows[user])

    def __getitem__(self, user: int) -> list[Row]:
        rows = self._rows[user]
        if self.most_rows is not None and len(rows) > self.most_rows:
            rows = [rows[i] for i in torch.randperm(len(rows), device="cpu")[: self.most_rows]]
        return [(int(user), self.dataset[row]) for row in rows]


class UserCollate:
    """Collates the rows of several users, and says whose each row is.

    A batch that is a mapping gets another key; another one becomes a tuple with the users last.

    Args:
        collate_fn: for lists of rows, as for `DataLoader`.
        key: name of the tensor of users `[rows]` in a mapping: what `privacy_unit` names.
    """

    def __init__(
        self, collate_fn: Callable[[list[Any]], Any] = default_collate, key: str = "unit_ids"
    ) -> None:
        self.collate_fn, self.key = collate_fn, key

    def __call__(self, users: list[list[Row]]) -> Any:
        rows = [row for user in users for row in user]
        batch = self.collate_fn([row for _, row in rows])
        ids = torch.tensor([user for user, _ in rows], dtype=torch.int64, device="cpu")
        if isinstance(batch, Mapping):
            return {**batch, self.key: ids}
        return (*batch, ids) if isinstance(batch, tuple | list) else (batch, ids)
