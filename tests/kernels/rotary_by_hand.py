"""Calls a build of the kernel by hand, with buffers of exactly the size that a call needs; a script, run by a test.

    python rotary_by_hand.py LIBRARY fuzz SEED CALLS
    python rotary_by_hand.py LIBRARY broken WHAT

Only the standard library, so that it starts quickly under a sanitizer. Results in double are compared bit for bit with
the same arithmetic in Python; the other dtypes are there for the memory that they touch.
"""

import ctypes
import importlib.machinery
import importlib.util
import itertools
import random
import sys

STORED, WIDE = (4, 8, 2, 2), (4, 8, 4, 4)
CODE_OF_DOUBLE = 1


class Memory:
    """A buffer of its own allocation: doubles between -1 and 1, or any bits."""

    def __init__(self, count, width):
        self.count, self.width = count, width
        self.bytes = bytearray(random.randbytes(count * width))
        self.address = ctypes.addressof((ctypes.c_char * len(self.bytes)).from_buffer(self.bytes)) if count else 0
        if width == 8:
            self.numbers = memoryview(self.bytes).cast("d")
            for at in range(count):
                self.numbers[at] = random.uniform(-1, 1)


def strides(shape, order, slack):
    """Steps of a tensor whose axes lie in this order, slowest first, with some room between rows; and its reach."""
    steps, step = [0] * len(shape), 1
    for axis in reversed(order):
        steps[axis] = step
        step *= max(shape[axis], 1)
        step += random.choice(slack)
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True)) if all(shape) else 0
    return tuple(steps), reach


def drawn(code, pairs, channels, head_axis, tiled):
    """The five arguments of a tensor and the four of its table, and the memory that they point to."""
    axes = random.randint(3 if head_axis else 1, 9)
    shape = [*(random.choice((1, 1, 2, 3)) for _ in range(axes - 1)), channels]
    if axes > 2:
        shape[-3], shape[-2] = random.choice((1, 3, 5)), random.choice((0, 1, 2, 7, 20))
    if tiled:  # several heads of many tokens, as they lie in memory
        axes, shape = 3, [random.choice((2, 3)), random.randint(250, 800), channels]
    rows, tokens = shape[:-1], []
    if head_axis:
        del rows[head_axis + 1]
        tokens = [rows.pop()]  # the axis on which the table may not be one for all
    rows = [random.choice((1, n)) for n in rows[random.randint(0, len(rows)) :]]
    table = (*rows, *tokens, pairs)
    order = [*(range(axes - 1) if tiled else random.sample(range(axes - 1), axes - 1)), axes - 1]
    x_steps, x_reach = strides(shape, order, (0, 3))
    order = [*(range(axes - 1) if tiled else random.sample(range(axes - 1), axes - 1)), axes - 1]
    out_steps, out_reach = strides(shape, order, (0, 1))
    table_steps, table_reach = strides(table, range(len(table)), (0, 5))
    x, out = Memory(x_reach, STORED[code]), Memory(out_reach, STORED[code])
    cos, sin = Memory(table_reach, WIDE[code]), Memory(table_reach, WIDE[code])
    arguments = [x.address, out.address, tuple(shape), x_steps, out_steps, cos.address, sin.address, table, table_steps]
    return arguments, (x, out, cos, sin)


def another(arguments, memories):
    """A second tensor like this one, with the same table."""
    x, out = (Memory(memory.count, memory.width) for memory in memories[:2])
    return [x.address, out.address, *arguments[2:]], (x, out, *memories[2:])


def check(arguments, memories, interleaved, first, head_axis, transposed):
    """Every number of the result, by the definition."""
    _, _, shape, x_steps, out_steps, _, _, table, table_steps = arguments
    x, out, cos, sin = memories
    pairs = table[-1]
    for index in itertools.product(*map(range, shape[:-1])):
        row = list(index)
        if head_axis:
            del row[head_axis + 1]
        row = row[len(row) - len(table) + 1 :]
        t = sum((i if n != 1 else 0) * s for i, n, s in zip(row, table[:-1], table_steps[:-1], strict=True))
        at_x, at_out = (sum(i * s for i, s in zip(index, steps[:-1], strict=True)) for steps in (x_steps, out_steps))
        expected = [x.numbers[at_x + c] for c in range(shape[-1])]
        for i in range(pairs):
            at_a, at_b = (first + 2 * i, first + 2 * i + 1) if interleaved else (first + i, first + pairs + i)
            a, b, c, s = expected[at_a], expected[at_b], cos.numbers[t + i], sin.numbers[t + i]
            s = -s if transposed else s
            expected[at_a], expected[at_b] = a * c - b * s, b * c + a * s
        assert expected == [out.numbers[at_out + c] for c in range(shape[-1])], (arguments, first, head_axis)


def fuzz(rotate, seed, calls):
    random.seed(seed)
    for at in range(int(calls)):
        code, interleaved, transposed = random.randrange(4), random.randrange(2), random.randrange(2)
        head_axis = random.choice((0, -2, -3))
        pairs, first = random.choice((0, 1, 2, 3, 7, 8, 9, 31, 64, 65)), random.randrange(3)
        tiled = at % 30 == 0
        if tiled:
            head_axis, pairs = -3, random.choice((64, 65))
        channels = first + 2 * pairs + random.randrange(3)
        tensors = [drawn(code, pairs, channels, head_axis, tiled) for _ in range(1 + at % 2)]
        tables = [arguments[5:] for arguments, _ in tensors]
        if at % 4 == 0:
            tensors.append(another(*tensors[0]))
        parts = [*(arguments[:5] for arguments, _ in tensors), *tables]
        rotate(code, interleaved, first, head_axis, transposed, *itertools.chain.from_iterable(parts))
        if code == CODE_OF_DOUBLE:
            for arguments, memories in tensors:
                check(arguments, memories, interleaved, first, head_axis, transposed)
    print(f"{calls} calls, each right")


def broken(rotate, what):
    short_out, short_table = what == "a result that is a row short", what == "a table that is a number short"
    x, out = Memory(3 * 8, 4), Memory((3 - short_out) * 8, 4)
    cos, sin = Memory(3 * 4, 4), Memory(3 * 4 - short_table, 4)
    shape, steps = (1, 3, 8), (24, 8, 1)
    if what == "sizes whose product is too large":
        shape, steps = (2**40, 2**40, 3, 8), (0, 0, 8, 1)
    rotate(0, 0, 0, -3, 0, x.address, out.address, shape, steps, steps, cos.address, sin.address, (3, 4), (4, 1))


if __name__ == "__main__":
    loader = importlib.machinery.ExtensionFileLoader("_rotary", sys.argv[1])
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_rotary", loader))
    loader.exec_module(module)
    {"fuzz": fuzz, "broken": broken}[sys.argv[2]](module.rotate, *sys.argv[3:])
