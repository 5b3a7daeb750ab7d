"""Make surveys of steps that never ran, from short scripts."""

from __future__ import annotations

from lightning_cyclic.runtime.stages.evidence import (
    Call,
    Held,
    Line,
    Read,
    Storage,
    Survey,
    Use,
    Value,
)

LINE = Line("script.py", 1)


class Writer:
    """Write a survey.

    A script is a list of nodes: ("layer", ns, parameter bytes, activation bytes, *inputs), each
    input as how many layers' outputs ago it was made, ("read",), ("old", k): the k-th layer again,
    ("box", script), and ("call", path, ns, parameter bytes, activation bytes, inputs by path).
    Times are in ns, or in what ``unit_ns`` says.
    """

    def __init__(self, script, unit_ns=1):
        self.unit_ns = unit_ns
        self.tick, self.now = 0, 0
        self.calls, self.values, self.reads, self.stack = [], [], [], []
        self.uses, self.sizes, self.counts = {}, {}, {}
        self.layers, self.outputs = [], {}
        for k, node in enumerate(script):
            self.node(node, str(k))

    def node(self, node, path):
        kind, *rest = node
        if kind == "layer":
            self.layers.append((path, rest[:3]))
            back = {len(self.values) - 1 - k for k in rest[3:]}
            self.layer(path, *rest[:3], {k for k in back if k >= 0})
        elif kind == "call":
            name, *costs, inputs = rest
            self.layer(name, *costs, {self.outputs[x] for x in inputs})
            self.outputs[name] = len(self.values) - 1
        elif kind == "old" and self.layers:
            old, layer = self.layers[rest[0] % len(self.layers)]
            self.layer(old, *layer)
        elif kind == "read" and self.values:
            self.reads.append(Read(len(self.values) - 1, self.use(), "item"))
        elif kind == "box":
            number = self.begin(path)
            for k, inner in enumerate(rest[0]):
                self.node(inner, f"{path}.{k}")
            self.end(number, frozenset({len(self.values) - 1} if self.values else ()))

    def layer(self, path, ns, parameter_bytes, activation_bytes, inputs=()):
        number = self.begin(path)
        use = self.use()
        self.now += ns * self.unit_ns
        self.uses.setdefault(path, []).append(use)
        self.sizes[path] = parameter_bytes
        for k in inputs:
            self.values[k][-1].append(use)
        self.values.append((activation_bytes, use, frozenset({number}), []))
        self.end(number, frozenset({len(self.values) - 1}))

    def begin(self, path):
        self.tick += 1
        n = self.counts.get(path, 0)
        self.counts[path] = n + 1
        self.calls.append([path, n, self.stack[-1] if self.stack else None, self.tick, self.now])
        self.stack.append(len(self.calls) - 1)
        return self.stack[-1]

    def end(self, number, outputs):
        self.tick += 1
        self.calls[self.stack.pop()] += [self.tick, self.now, outputs]

    def use(self):
        self.tick += 1
        return Use(self.tick, self.stack[-1] if self.stack else None, LINE)

    def survey(self):
        return Survey(
            title="Script",
            modules=tuple(self.counts),
            calls=tuple(
                Call(
                    path=path, n=n, parent=parent, begin=begin, end=end, begin_ns=begin_ns,
                    end_ns=end_ns, is_unit=True, outputs=outputs,
                )
                for path, n, parent, begin, begin_ns, end, end_ns, outputs in self.calls
            ),
            values=tuple(
                Value(
                    storage=k, num_bytes=size, derived=True, made=made, units=units,
                    uses=tuple(uses),
                )
                for k, (size, made, units, uses) in enumerate(self.values)
            ),
            storages=tuple(Storage(size, None) for size, *_ in self.values),
            reads=tuple(self.reads),
            changes=(),
            parameters={p: Held(self.sizes[p], tuple(uses)) for p, uses in self.uses.items()},
            buffers={},
            changed={},
            metrics={},
            end=self.tick,
            duration_ns=self.now,
        )  # fmt: skip
