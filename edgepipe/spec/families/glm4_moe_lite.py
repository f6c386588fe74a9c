"""GLM-4.7-Flash: latent attention, a leading dense layer, then experts that a corrected sigmoid chooses."""

from __future__ import annotations

from edgepipe.spec.families.glm4_moe import corrected_router
from edgepipe.spec.families.latent_attention import LatentSizes, hf_latent
from edgepipe.spec.families.reading import Family, FamilySpec, HfShape, unsupported
from edgepipe.spec.layer_spec import Dense, LayerSpec
from edgepipe.spec.shape_limits import MAX_EXPERTS, MAX_LAYERS


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    attention = hf_latent(shape, LatentSizes(query_rank=768, nope_dim=192, value_dim=256))
    inner = shape.inner("moe_intermediate_size", 1536)
    shared = inner * shape.fields.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=1)
    router = corrected_router(shape, scale=1.8, groups=1, groups_used=1)
    experts = shape.mixture(shape.experts("n_routed_experts", 64), 4, inner, router, shared_inner=shared)
    kinds = {
        "dense": LayerSpec(attention=attention, dense=Dense(inner=shape.inner(default=10_240))),
        "sparse": LayerSpec(attention=attention, experts=experts),
    }
    layers = tuple(kinds[kind] for kind in _layer_kinds(shape))
    mtp = shape.mtp(kinds["sparse"])
    return FamilySpec(layers=layers, norm=shape.norm(1e-5), tied_embeddings=shape.tied(), mtp=mtp)


def _layer_kinds(shape: HfShape) -> list[str]:
    """Return "dense" or "sparse" of each layer; by default the first is dense."""
    if found := [kind for kind in shape.fields.items("mlp_layer_types") if isinstance(kind, str)]:
        if len(found) != shape.num_layers or not {"dense", "sparse"}.issuperset(found):
            raise shape.fields.fail("mlp_layer_types", f"{shape.num_layers} times dense or sparse is needed")
        return found
    if shape.fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1) != 1:  # transformers: always 1
        raise unsupported("first_k_dense_replace without mlp_layer_types", ["1"])
    return ["dense"] + ["sparse"] * (shape.num_layers - 1)


GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    hf_class="Glm4MoeLiteForCausalLM",
    models="GLM-4.7-Flash",
    from_hf=_hf,
    default_context=202_752,
    naming="glm4_moe",
    with_experts=True,
)
