"""A trained model as a service: completions, embeddings and classes over HTTP, as OpenAI's clients ask for them."""
