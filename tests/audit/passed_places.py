"""Records which of some places in the source are passed, in the tests and in every process that they start.

LACONIC_PLACES names a JSON file with two keys. "places" has the places by file, each as [number, first line, last line,
columns], where columns are those of a part of an expression, or null for a statement. "passed" names a file that gets
the number of each place, a line each, when a process comes there first. It is written at once, since ranks are killed.
"""

import json
import os
import sys
import threading

VARIABLE = "LACONIC_PLACES"


class _Places:
    """The places of one file that this process has not passed yet."""

    def __init__(self, places):
        self.by_line, self.parts, self._left = {}, [], {}
        for number, first, last, columns in places:
            if columns is None:
                for line in range(first, last + 1):
                    self.by_line.setdefault(line, []).append(number)
            else:
                self.parts.append((number, (first, columns[0]), (last, columns[1])))

    def of(self, code):
        """The lines of a function that nothing has passed yet, and the places of its instructions, by their offset."""
        if code not in self._left:
            lines = {line for *_, line in code.co_lines() if line in self.by_line}
            offsets = {}
            for index, (line, last, column, end) in enumerate(code.co_positions()):
                if None not in (line, last, column, end):
                    inside = [n for n, first, final in self.parts if first <= (line, column) and (last, end) <= final]
                    if inside:
                        offsets[2 * index] = inside
            self._left[code] = lines, offsets
        return self._left[code]


_files = {}
_passed = set()
_target = ""


def _note(numbers):
    new = [number for number in numbers if number not in _passed]
    if new:
        _passed.update(new)
        file = os.open(_target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, "".join(f"{number}\n" for number in new).encode())
        os.close(file)


def _enter(frame, event, argument):
    places = _files.get(frame.f_code.co_filename)
    if places is None:
        return None
    lines, offsets = places.of(frame.f_code)
    if not lines and not offsets:
        return None
    frame.f_trace_opcodes = bool(offsets)

    def step(frame, event, argument):
        if event == "line" and frame.f_lineno in lines:
            lines.discard(frame.f_lineno)
            _note(places.by_line[frame.f_lineno])
        elif event == "opcode" and frame.f_lasti in offsets:
            _note(offsets.pop(frame.f_lasti))
        return step

    return step


def install():
    """Watch this thread, and those that it starts."""
    global _target
    with open(os.environ[VARIABLE], encoding="utf-8") as file:
        told = json.load(file)
    _target = told["passed"]
    _files.update({name: _Places(places) for name, places in told["places"].items()})
    threading.settrace(_enter)
    sys.settrace(_enter)


if VARIABLE in os.environ:
    install()
