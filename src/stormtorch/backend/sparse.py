"""All-reduce of sparse tensors: every rank gathers all indices and values, whose numbers may differ by rank."""

import torch

from stormtorch.collectives import Group, all_gather


def sum_sparse(group: Group, tensor: torch.Tensor, timeout_s: float) -> None:
    """Replaces a sparse tensor by its sum over the group. Blocks until that is done."""
    own = tensor.detach().coalesce().cpu()
    counts = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(group.size)]
    all_gather(group, counts, torch.tensor([own._nnz()], device="cpu"), timeout_s=timeout_s).wait()
    numbers = [int(each) for each in counts]
    gathered = []
    for part, along in ((own.indices().contiguous(), 1), (own.values().contiguous(), 0)):
        outputs = []
        for number in numbers:
            shape = list(part.shape)
            shape[along] = number
            outputs.append(torch.empty(shape, dtype=part.dtype, device="cpu"))
        all_gather(group, outputs, part, timeout_s=timeout_s).wait()
        gathered.append(torch.cat(outputs, along))
    with torch.no_grad():
        total = torch.sparse_coo_tensor(gathered[0], gathered[1], own.shape, check_invariants=True).coalesce()
        tensor.copy_(total.to(tensor.device))
