"""ROUGE-L of summaries: the longest common subsequence of words with the best reference, by the `rouge-score` package."""

import numpy as np

from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic, mean_statistic
from model_optimizer.metrics.words import example_answers, words


class WordTokenizer:
    """What `rouge-score` shall take for words; its own tokenizer drops every character beyond a-z and 0-9."""

    def tokenize(self, text: str) -> list[str]:
        return list(words(text))


def rouge_l(answers: Answers) -> Statistic:
    """Return the ROUGE-L F-measure of every output against its best reference.

    Source: Lin, ROUGE - a package for automatic evaluation of summaries, 2004.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], tokenizer=WordTokenizer())
    return mean_statistic(
        np.array(
            [
                max(float(scorer.score(reference, output)["rougeL"].fmeasure) for reference in references)
                for output, references in zip(answers.outputs_N, answers.references_N, strict=True)
            ]
        )
    )


METRICS.register("rouge_l")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=True,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: rouge_l(answers).value,
        example=lambda seed: Answers(*example_answers(seed)),
        statistic=rouge_l,
    )
)
