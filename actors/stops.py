"""Stop strings, matched one piece of text at a time.

Why: a stop string may lie across any number of tokens, so text that might still become one has to be held back, and
nothing else. Rules of this file: no character is looked at twice (the failure function of Knuth, Morris and Pratt,
"Fast pattern matching in strings", 1977), whatever the stop strings and the text; it knows characters, not tokens.
"""

from __future__ import annotations


class _Pattern:
    """One stop string and how much of it the text so far ends with."""

    __slots__ = ("failure", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0  # characters of the string that the text ends with
        self.failure = [0, 0]  # [k] = longest proper border of the first k characters; grown as far as it is needed

    def step(self, char: str) -> bool:
        """Take one character; True when the string is complete with it."""
        string, matched = self.string, self.matched
        if matched == len(string):
            matched = self._border(matched)
        while matched and string[matched] != char:
            matched = self._border(matched)
        if string[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(string)

    def _border(self, length: int) -> int:
        failure, string = self.failure, self.string
        while len(failure) <= length:
            last = string[len(failure) - 1]
            k = failure[-1]
            while k and string[k] != last:
                k = failure[k]
            failure.append(k + 1 if string[k] == last else 0)
        return failure[length]


class StopMatcher:
    """Watches text for up to a few stop strings (none of them empty).

    Among the strings that complete within one ``feed``, the one that starts earliest wins; which of two that start
    together is meant makes no difference, since the text is cut at the start.
    """

    __slots__ = ("_first", "_patterns", "held")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._patterns = [_Pattern(s) for s in dict.fromkeys(stops)]
        self._first = frozenset(s[0] for s in stops)
        self.held = 0  # characters at the end of the text that may still become a stop string

    def feed(self, text: str, may_stop: bool = True) -> int | None:
        """Take the next piece of text. Returns None, or how many characters before the end of the text so far the
        winning stop string begins. With ``may_stop`` false, strings that complete in this piece are ignored."""
        if not self.held and self._first.isdisjoint(text):
            return None
        best = None
        left = len(text)
        patterns = self._patterns
        for char in text:
            left -= 1
            for pattern in patterns:
                if (pattern.matched or char == pattern.string[0]) and pattern.step(char) and may_stop:
                    start = left + len(pattern.string)
                    best = start if best is None or start > best else best
        # A complete string that did not count can still be the beginning of another match, through its border.
        self.held = max([p.matched if p.matched < len(p.string) else p._border(p.matched) for p in patterns], default=0)
        return best
