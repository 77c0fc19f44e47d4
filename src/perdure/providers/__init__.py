"""Models: adapters of the provider port. Each module is loaded only when its models are used.

``openai``, ``azure``, ``anthropic`` and ``google`` speak to providers, ``library`` wraps a model object of pydantic-ai,
``scripted`` plays prepared answers, ``resolve`` turns a name such as ``"openai:gpt-5.6"`` into a model, and ``pricing``
tells what tokens cost.
"""

from perdure.rules.accounting import Price, Rate

__all__ = ["Price", "Rate"]
