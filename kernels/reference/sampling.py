"""Which tokens kernels look at where a sample is enough: choose_sample of live_keys.cuh."""

import torch

SAMPLES = 128


def choose_tokens(live: torch.Tensor) -> torch.Tensor:
    """Of bool ``live`` [N] the indices of at most SAMPLES tokens that count, one per stretch."""
    flags = live.tolist()
    length, chosen = len(flags), []
    for sample in range(SAMPLES):
        first, end = sample * length // SAMPLES, (sample + 1) * length // SAMPLES
        position = (sample << 16) + (sample * 40503 & 0xFFFF)
        token = min(position * length // SAMPLES >> 16, end - 1)
        for _ in range(first, end):
            if flags[token]:
                chosen.append(token)
                break
            token = token + 1 if token + 1 < end else first
    return torch.tensor(chosen, dtype=torch.long, device=live.device)


def sampled_mean(x: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """FP32 mean over a sample of the tokens of ``x`` [B, H, N, D] that count: [B, H, 1, D].

    live: bool [B, H, N]. Zero where no token counts.
    """
    return _per_head(x, live, lambda sample: sample.double().mean(0).float())


def sampled_deviation(x: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """The same of the distances from that mean."""

    def deviation(sample: torch.Tensor) -> torch.Tensor:
        mean = sample.double().mean(0).float()
        return (sample - mean).abs().double().mean(0).float()

    return _per_head(x, live, deviation)


def _per_head(x: torch.Tensor, live: torch.Tensor, reduce) -> torch.Tensor:
    out = torch.zeros_like(x[:, :, :1])
    chosen = {}  # heads mostly share what counts
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            flags = live[b, h]
            key = (flags.data_ptr(), flags.stride())
            if key not in chosen:
                chosen[key] = choose_tokens(flags)
            if chosen[key].numel():
                out[b, h, 0] = reduce(x[b, h, chosen[key]])
    return out
