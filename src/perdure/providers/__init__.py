"""Models: adapters of the provider port. Each module is loaded only when its models are used.

``scripted`` plays prepared answers, ``openai`` speaks to OpenAI-compatible servers, ``resolve`` turns a name such as
``"openai:gpt-5.6"`` into a model.
"""
