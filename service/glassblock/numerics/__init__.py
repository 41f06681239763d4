"""Tensors in, tensors out: the mathematics of a block, without files, JSON or HTTP.

One layout holds in every module of this package:

- A linear weight is stored `[out, in]`, as `torch.nn.Linear` keeps it, and is applied as `x @ weight.T`.
- Activations are `[*batch, d]`: the last axis is the width, every axis before it counts tokens. A feed-forward block
  couples no two of them, so `[d]`, `[T, d]` and `[B, T, d]` are all accepted; where tokens meet (attention, whole
  layers, chains) they lie on the axis before the width.
- `d` is the model width, `m` the width of the feed-forward network. A **neuron** is one hidden unit i of m: row i of
  `gate` and `up` (both `[m, d]`), its bias entries, and **column** i of `down` (`[d, m]`).
- A Jacobian is `[*batch, d, d]` with the output first: `J[..., i, j]` is the derivative of output i by input j.
- A norm's gain and bias are `[d]`, as stored: a family's offset (`1 + w`) belongs to the arithmetic, not to the tensor.

Precision: whatever is summed is summed in float32 at least, and float64 stays float64. A narrower dtype is used only
where the caller asks to emulate an engine that runs in it.
"""
