"""vLLM's attention backend CUSTOM: one name for three backends, of which a layer gets the one that it needs.

vLLM resolves the name to one class, and then asks this class whether it supports a layer's configuration and for the
path of the backend, one call after the other (`CudaPlatformBase.get_attn_backend_cls`). `VllmSelector` answers both for
the backend that the layer needs: `VllmBackend` for K and V per head, `VllmLatentBackend` for dense MLA and
`VllmSparseBackend` for MLA over chosen keys. It is never a layer's backend itself.
"""

from typing import Any, ClassVar

from .vllm import VllmBackend


def backend_of(use_mla: bool, use_sparse: bool) -> type[Any]:
    """Return the backend of a layer."""
    if not use_mla:
        return VllmBackend
    if use_sparse:
        from .vllm_latent_sparse import VllmSparseBackend

        return VllmSparseBackend
    from .vllm_latent import VllmLatentBackend

    return VllmLatentBackend


class VllmSelector(VllmBackend):
    """Stands for the backend of the layer that was asked about last."""

    _selected: ClassVar[type[Any]] = VllmBackend

    @classmethod
    def validate_configuration(cls, *, use_mla: bool, use_sparse: bool, **asked: Any) -> list[str]:  # type: ignore[override]
        """Return the reasons for which the layer's backend does not support a configuration."""
        cls._selected = backend_of(use_mla, use_sparse)
        found: list[str] = cls._selected.validate_configuration(use_mla=use_mla, use_sparse=use_sparse, **asked)
        return found

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Return the module and the name of the backend that `validate_configuration` was asked about."""
        found: tuple[str, str] = cls._selected.full_cls_name()
        return found
