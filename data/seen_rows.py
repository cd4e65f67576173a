"""Statistics of checked rows, for the description of the data: their lengths, and the roles that count."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from data.prompts import THOUGHTS, RowTokens
from data.templates import Chat


@dataclass
class SeenRows:
    """Numbers of rows that were checked.

    Attributes:
        rows: The number of rows, encoded or not.
        lengths: For each encoded row, the number of inputs, and of inputs before the first target that counts.
        roles: For each role of chats, the number of messages, and whether they count in the loss.
        unread: For each key of messages that does not occur in the template, the number of messages.
    """

    rows: int
    lengths: list[tuple[int, int]] = field(default_factory=list)
    roles: dict[str, tuple[int, bool]] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)

    def add_lengths(self, encoded: list[tuple[list[int], np.ndarray]]) -> None:
        """Count rows, as RowTokens.encode returns them."""
        self.lengths += [(len(tokens) - 1, int(np.argmax(np.append(counted[1:], True)))) for tokens, counted in encoded]

    def add_messages(self, chats: list[Chat], row_tokens: RowTokens) -> None:
        """Count the messages of chats."""
        for chat in chats:
            for message in chat.messages:
                role = message["role"]
                number, counts = self.roles.get(role) or (0, row_tokens.counts(chat, role))
                self.roles[role] = number + 1, counts
                for key in message.keys() - set(THOUGHTS[1:]):  # the first one has them, too
                    if not row_tokens.reads(*THOUGHTS if key in THOUGHTS else [key]):
                        self.unread[key] = self.unread.get(key, 0) + 1

    def describe(self, seq_len: int, widths: str, how: str = "padded") -> str:
        """Return to which ``widths`` rows are padded or packed, how many are cut, and which roles count."""
        inputs, first = np.array(self.lengths).T
        cut, holds = inputs > seq_len, np.quantile(inputs, 0.95, method="inverted_cdf")
        notes, some = [], len(inputs) < self.rows
        if cut.any() or some:
            notes.append(f"{cut.sum():,} of {len(cut):,} rows{' that were encoded' * some} are longer")
        if lost := (cut & (first >= seq_len) & (first < inputs)).sum():
            notes.append(f"{lost:,} have no answer left")
        if never := (first == inputs).sum():
            notes.append(f"{never:,} of {len(cut):,} rows have nothing that counts in the loss")
        if holds > seq_len:
            notes.append(f"data.seq_len={holds} holds 95 % of them")
        by: dict[bool, list[str]] = {True: [], False: []}
        for role, (number, counts) in sorted(self.roles.items()):
            by[counts].append(f"{role} ({number:,})")
        padded = f"{how}{' or cut' * bool(cut.any() or some)} to {widths} tokens{': ' * bool(notes)}{', '.join(notes)}"
        roles = f"; messages that count: {', '.join(by[True])}; that do not: {', '.join(by[False])}"
        unread = ", ".join(f"{key} ({number:,})" for key, number in sorted(self.unread.items()))
        return padded + roles * bool(self.roles) + f"; not in the template: {unread}" * bool(unread)
