"""What requests cost: price of the machine over what it serves."""


def usd_per_1k_requests(usd_per_hour: float, output_tok_per_s: float, output_tokens_per_request: float) -> float:
    """Return the price of 1,000 requests when the machine decodes `output_tok_per_s` all the time.

    At 1.20 USD per hour, 600 tokens per second and 200 tokens per request: 1.2 / 3600 x 1000 x 200 / 600 = 0.111 USD.
    """
    return usd_per_hour / 3600 * 1000 * output_tokens_per_request / output_tok_per_s
