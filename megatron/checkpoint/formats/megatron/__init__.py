"""Megatron-LM's classic layout: `mp_rank_XX` folders written with torch.save."""
