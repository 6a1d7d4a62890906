"""The parts of a `config.json` that only some families have: experts, latent attention, Gemma.

Each becomes the object of `types.py` that describes it, or an error that names the field. Left out:
whether megatron-core can run what is described (`core_config.py` refuses what it cannot).
"""

from megagrpo.model.hf_families import Family
from megagrpo.model.hf_fields import Fields, count, flag, integer, names, number
from megagrpo.types import Experts, GemmaTraits, LatentAttention


def experts_of(config: Fields, family: Family, layers: int) -> Experts | None:
    """The mixture of experts, if the family has one; ValueError for odd mixtures of layers."""
    if family.name in ("deepseek_v2", "deepseek_v3"):
        return _deepseek_experts(config, family, layers)
    if family.name not in ("qwen3_moe", "mixtral"):
        return None
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) not in (None, 1):
        raise ValueError(
            f"mlp_only_layers={config.get('mlp_only_layers')!r}, decoder_sparse_step="
            f"{config.get('decoder_sparse_step')!r}: only experts in every layer are supported"
        )
    experts = Experts(
        count=_expert_count(config),
        top_k=integer(config, "num_experts_per_tok"),
        router_bias=flag(config, "moe_router_enable_expert_bias", False),
        normalized=family.name == "mixtral" or flag(config, "norm_topk_prob", False),
    )
    return _checked(experts)


def _expert_count(config: Fields, own: str = "num_local_experts") -> int:
    """Under any of the names that transformers 4 and 5 give it."""
    keys = [own, "num_local_experts", "num_experts"]
    found = {key: integer(config, key) for key in keys if config.get(key) is not None}
    if len(set(found.values())) > 1:
        raise ValueError(f"the number of experts is given with different values: {found}")
    return next(iter(found.values())) if found else integer(config, own)


def _deepseek_experts(config: Fields, family: Family, layers: int) -> Experts:
    if config.get("moe_layer_freq", 1) not in (None, 1):
        raise ValueError(f"moe_layer_freq={config['moe_layer_freq']!r} is not supported; only 1 is")
    dense = count(config, "first_k_dense_replace")
    if dense >= layers:
        raise ValueError(f"first_k_dense_replace={dense} leaves no layer of {layers} with experts")
    third = family.name == "deepseek_v3"
    if not third and flag(config, "norm_topk_prob", False):
        raise ValueError("norm_topk_prob=true is not supported for deepseek_v2")
    grouped = third or config.get("topk_method", "greedy") == "group_limited_greedy"
    if config.get("topk_method") not in (None, "noaux_tc" if third else "greedy") and not (
        grouped and not third
    ):
        raise ValueError(f"topk_method={config['topk_method']!r} not supported for {family.name}")
    if config.get("scoring_func") not in (None, "sigmoid" if third else "softmax"):
        raise ValueError(f"scoring_func={config['scoring_func']!r} not supported for {family.name}")
    size = integer(config, "moe_intermediate_size")
    experts = Experts(
        count=_expert_count(config, "n_routed_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        router_bias=third,
        ffn_hidden_size=size,
        shared_ffn=size * integer(config, "n_shared_experts"),
        dense_layers=dense,
        score="sigmoid" if third else "softmax",
        normalized=third and flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 2.5 if third else 1.0),
        groups=integer(config, "n_group") if grouped else 1,
        groups_kept=integer(config, "topk_group") if grouped else 1,
        group_score_top=2 if third else 1,
    )
    return _checked(experts)


def _checked(experts: Experts) -> Experts:
    if experts.top_k > experts.count:
        raise ValueError(
            f"num_experts_per_tok={experts.top_k} is over the {experts.count} experts there are"
        )
    if experts.count % experts.groups or experts.groups_kept > experts.groups:
        raise ValueError(
            f"n_group={experts.groups}, topk_group={experts.groups_kept} do not fit "
            f"{experts.count} experts"
        )
    return experts


def latent_of(config: Fields, family: Family) -> LatentAttention | None:
    """Latent attention, if the family has it."""
    if family.name not in ("deepseek_v2", "deepseek_v3"):
        return None
    heads = integer(config, "num_attention_heads")
    if config.get("num_key_value_heads") not in (None, heads):
        raise ValueError(
            f"num_key_value_heads={config['num_key_value_heads']!r} must be num_attention_heads="
            f"{heads} in latent attention"
        )
    if not flag(config, "rope_interleave", True):
        raise ValueError("rope_interleave=false is not supported; megatron-core interleaves")
    query = config.get("q_lora_rank", 1536)  # null: no low-rank query
    return LatentAttention(
        query_rank=None if query is None else integer({"q_lora_rank": query}, "q_lora_rank"),
        kv_rank=integer(config, "kv_lora_rank"),
        nope_dim=integer(config, "qk_nope_head_dim"),
        rope_dim=integer(config, "qk_rope_head_dim"),
        value_dim=integer(config, "v_head_dim"),
    )


def gemma_of(config: Fields, family: Family, layers: int, local_theta: float) -> GemmaTraits | None:
    """What only Gemma has, if it is one."""
    if family.name not in ("gemma2", "gemma3"):
        return None
    window = config.get("sliding_window", 4096)
    kinds = _layer_kinds(config, family, layers)
    if "sliding_attention" in kinds and window is not None:
        window = integer({"sliding_window": window}, "sliding_window")
    # What transformers assumes for Gemma 2; a null switches it off, for Gemma 3 absence does.
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    given = (caps if family.name == "gemma2" else {}) | config
    cap, final = (number(given, key) if given.get(key) is not None else None for key in caps)
    return GemmaTraits(
        query_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        local_rope_theta=local_theta,
        attention_softcap=cap,
        logit_softcap=final,
    )


def _layer_kinds(config: Fields, family: Family, layers: int) -> list[str]:
    """Which attention each layer has: as listed, else every second (Gemma 2) or all but every
    n-th (Gemma 3) with a window."""
    kinds = names(config, "layer_types")
    if not kinds:
        every = (
            2
            if family.name == "gemma2"
            else integer({"sliding_window_pattern": 6} | config, "sliding_window_pattern")
        )
        return [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(layers)
        ]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise ValueError(
            f"layer_types has {len(kinds)} entries for {layers} layers, unknown ones: {unknown}"
        )
    return kinds
