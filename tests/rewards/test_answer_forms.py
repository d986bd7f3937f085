"""Answers in many forms: right where math-verify alone is not, and as it says for what is no plain number."""

from __future__ import annotations

import logging
from types import ModuleType

import pytest

from holdfast.rewards.functions.final_answers import final_answer
from holdfast.rewards.functions.mathematics import MathReward

NUMBERS = [
    ("18", "18"),
    ("-3", "-3"),
    ("1234", "1,234"),
    ("0.5", "0.5"),
    ("2.50", "2.50"),
    ("1/2", r"\frac{1}{2}"),
    (r"\frac{3}{4}", r"\frac{3}{4}"),
    ("12", "12"),
    ("1000000", "1,000,000"),
]
"""Gold answers, and how a completion writes them."""

FORMS = r"""
\boxed{%}
\boxed{ % }
\boxed{%.}
\boxed{%.}.
$\boxed{%}$
$$\boxed{%}$$
\[\boxed{%}\]
\(\boxed{%}\)
\boxed{$%$}
\boxed{\$%}
\boxed{\$ %}
\boxed{\text{\$}%}
\boxed{%\%}
\boxed{%\text{ dollars}}
\boxed{% \text{ apples}}
\boxed{%~\text{km}}
\boxed{%\ \mathrm{km}}
\boxed{\mathbf{%}}
\boxed{\text{%}}
\boxed {%}
\fbox{%}
\boxed{+%}
\boxed{\text{% eggs}}
\boxed{%}~I hope it is correct.
**\boxed{%}**
\boxed{**%**}
\boxed{% per day}
First \boxed{7777}, then \boxed{%}
#### %
####%
#### %.
#### $%
#### $%.
#### % dollars
#### % eggs
#### **%**
#### %%
#### \$%
#### $%$
#### $%$ dollars
#### \(%\)
#### \boxed{%}
#### Answer: %
#### **Answer:** %
#### The answer is %.
#### She makes $% per day.
#### Total: %
The answer is %
The answer is %.
The final answer is $%$.
The final answer is $%$. I hope it is correct.
<answer>%</answer>
<answer> % </answer>
<answer>\boxed{%}</answer>
<answer>The total is % apples.</answer>
\boxed{%} <|im_end|>
**Answer:** %
The answer is \(%\).
\boxed{%}$ and check: $1+1=2$
""".strip().split("\n")
"""A per cent sign stands for the answer; two, for an answer in per cent."""

OTHERS = [  # gold answer, completion, whether it is right
    (r"\$18", r"\boxed{\$18}", True),
    (r"\$18.90", r"\boxed{18.90}", True),
    (r"\$1{,}234", r"\boxed{1234}", True),
    (r"The answer is \$18.", r"\boxed{18}", True),
    ("$18", r"\boxed{19}", False),
    ("[1,100]", r"\boxed{[1,100]}", True),
    ("[1,100]", r"\boxed{[1,101]}", False),
    ("(1,234)", r"\boxed{(1,234)}", True),
    ("3.5", r"\boxed{3 1/2}", True),
    ("2", r"\boxed{3 1/2}", False),
    ("1000", r"\boxed{1\,000}", True),
    ("0", r"\boxed{1 000}", False),
    ("6.02e23", r"\boxed{6.02\times 10^{23}}", True),
    ("6.02e23", r"\boxed{6.02\times 10^{22}}", False),
    ("90", r"\boxed{90°}", True),
    (r"\emptyset", r"\boxed{\varnothing}", True),
    ("42", r"\boxed{$41$ $42$}", False),
    ("42", r"\boxed{6 \times 7 = 42}", True),
    ("0.000001", r"\boxed{0.0000014}", False),
    ("0.000001", r"\boxed{10^{-6}}", True),
    (r"10^{-7}\sqrt{2}", r"\boxed{0.00000021}", False),
    ("1/3", r"\boxed{0.333333}", True),
    ("1/3", r"\boxed{0.333}", False),
    (r"\sqrt{2}", r"\boxed{1.41421356}", True),
    ("0.1+0.2", r"\boxed{0.3}", True),
    ("0.3", r"\boxed{0.30000000000000004}", True),
    ("100000000000000000001", r"\boxed{100000000000000000000}", False),
    ("10 cm", r"\boxed{10 m}", True),  # units are compared by nobody
    ("10 cm", r"\boxed{10cm}", True),
    ("10 cm", r"\boxed{12 m}", False),
    ("10 cm", r"\boxed{10\text{ cm}}", True),
    (r"10\text{ cm}^2", r"\boxed{10\,\mathrm{cm}^3}", True),
    ("10", r"\boxed{10\,\text{cm}^2}", True),
    ("4210_{5}", r"\boxed{4210_5}", True),
    ("4210_{5}", r"\boxed{4210}", True),  # as math-verify, which drops the base
    ("4210_{5}", r"\boxed{4210_7}", True),
    ("4210_{5}", r"\boxed{4211_5}", False),
    ("50%", r"\boxed{0.5}", True),
    ("50", r"\boxed{50\%}", True),
    ("50%", r"\boxed{5000\%}", False),
    ("18", r"\boxed{18 \text{ million}}", True),  # as math-verify, which drops a text behind a number
    ("18", r"\boxed{18 million}", False),
    ("5", "#### 3 or 5", False),
    ("18", "#### minus 18", False),
    ("18", "#### twice 18", False),
    ("20", r"\boxed{\text{June } 20}", False),
    (r"\text{June 20}", r"\boxed{\text{June 20}}", True),
    (r"\text{June 20}", r"\boxed{20}", False),
    (r"\text{(A)}", r"\boxed{A}", True),
    ("B", r"\boxed{A}", False),
    ("5", r"\boxed{x+5}", False),
    ("5", "#### x+5", False),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
    ("120", r"\boxed{5!}", True),
    ("2,-2", r"\boxed{\pm 2}", True),
    ("x=5", r"\boxed{5}", True),
    ("3-4i", r"\boxed{3+4i}", False),
    ("7", r"\boxed{1/0}", False),
    ("7", r"\boxed{}", False),
    ("1e400", r"\boxed{1e400}", True),
    ("1e400", r"\boxed{2e400}", False),
    ("1e400", r"\boxed{1/3}", False),
    ("1e-400", r"\boxed{1/3}", False),
    ("6", "#### 2*3 = 6 eggs", True),
    ("6", "#### 2*3 = 7 eggs", False),
    ("5", "#### x = 3 or 5", False),
    ("18", "#### $18/day", True),
    ("18", r"\boxed{18/day}", True),
    ("18", r"\boxed{18/\pi}", False),
    ("18", r"\boxed{18/x}", False),
    ("18", "#### 9 eggs at 2 dollars is 18 dollars", True),
    ("2", "#### 9 eggs at 2 dollars is 18 dollars", False),
    ("18", "#### 3 is less than 18", False),
    ("18", "#### it is not 18", False),
    ("18", "#### 18!", True),
    ("18", r"\boxed{18!}", False),
    ("120", "#### 5!", False),
    ("x+1", "#### The answer is 1+x.", True),
    ("(1,2)", "#### Total: (1,2)", True),
    (r"2\sqrt{3}", r"#### $\sqrt{12}$ dollars", True),
    ("yes", "#### yes", True),
    ("5%", r"\boxed{x=0.05}", True),
    ("5 m/s", r"\boxed{5}", True),
    ("9.8 m/s^2", r"\boxed{9.8\,\text{m/s}^2}", True),
    ("5 m/s", r"\boxed{5 \text{ km/h}}", True),
    ("18", r"\boxed{" + 10 * "{" + "18" + 10 * "}" + "}", True),
    ("18", r"\boxed{" + 4000 * "{" + "18" + 4000 * "}" + "}", False),
]


@pytest.fixture(scope="module")
def math_verify() -> ModuleType:
    return pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def reward(math_verify: ModuleType) -> MathReward:
    return MathReward.checked("answer", math_verify.__name__)


def written(form: str, answer: str) -> str:
    return f"We compute. {form.replace('%', answer, 1)}"


@pytest.mark.parametrize("form", FORMS)
def test_a_number_counts_in_every_form_and_its_neighbour_in_none(reward: MathReward, form: str) -> None:
    right = [reward.equal(final_answer(gold), written(form, answer)) for gold, answer in NUMBERS]
    wrong = [reward.equal(final_answer(gold), written(form, f"9{answer.strip('-')}")) for gold, answer in NUMBERS[:5]]

    assert right == [True] * len(NUMBERS)
    assert wrong == [False] * 5


@pytest.mark.parametrize(("gold", "completion", "right"), OTHERS, ids=lambda value: str(value)[:60])
def test_other_answers_are_as_right_as_they_are(reward: MathReward, gold: str, completion: str, right: bool) -> None:
    assert reward.equal(final_answer(gold), completion) is right


@pytest.mark.parametrize("form", [r"\boxed{x = %}", r"\boxed{\left(%\right)}", r"\boxed{(%)}", "So $x=%$"])
def test_what_is_left_to_math_verify_is_what_it_says(reward: MathReward, math_verify: ModuleType, form: str) -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own alarms are off

    for gold, answer in NUMBERS:
        completion = written(form, answer)
        read = [math_verify.parse(text, parsing_timeout=None) for text in (f"${gold}$", completion)]
        alone = math_verify.verify(*read, timeout_seconds=None)
        assert reward.equal(final_answer(gold), completion) is alone


@pytest.mark.parametrize("gold", ["", " ", "$", r"\boxed{}", "$$"])
def test_a_gold_without_an_answer_is_unreadable(reward: MathReward, gold: str) -> None:
    assert reward.equal(final_answer(gold), r"\boxed{1}") is None
