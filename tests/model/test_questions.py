"""Which messages ask a question, and which part of a message is the question."""

import pytest

from memstore.model.questions import asks, leans, query_of, resolved

CHAT = [
    "hi",
    "hey there :)",
    "Good morning, Anna",
    "got it 👍",
    "who are you?",
    "Can you help me?",
    "Hi! Can you please help me with something?",
    "I have a question.",
    "Never mind.",
    "make that shorter",
    "Translate your answer into German.",
    "as bullet points",
    "Please summarize the above in one paragraph.",
    "Say that again.",
    "Tell me a joke",
    "Write me a short poem about the sea.",
    "Generate a concise, 3-5 word title with an emoji summarizing the chat history.",
    "### Task:\nSuggest 3-5 relevant follow-up questions or prompts.\n<chat_history>\nUSER: How "
    "much is the rent?\n</chat_history>",
    "Please write a 5-word title for the conversation: User: What is the warranty?",
    "thank you, that's all for today",
    "Hi, I'm Tom.",
    "Shorten your last answer to one line.",
    "And now in French, please",
    "Please respond with only a title of at most six words for the dialogue above.",
    "Based on the chat history, suggest three follow-up questions.",
    "one more time please",
]
QUESTIONS = [
    "How much is the monthly rent of Weaver House now?",
    "What does error E7 of the CP-40 pump mean?",
    "List all the fault codes of the CP-40 pump.",
    "waht is the warrenty of the CP-60 pupm?",
    "Quand l'agence de Lyon quitte-t-elle la rue Garibaldi ?",
    "rent weaver house",
    "And of the CP-60?",
    "And Gloucester?",
    "How much is it?",
    "What about the second one?",
    "Summarize the lease.",
    "Translate the warranty clause of the CP-60 into German.",
    "Tell me about the schooner Nantasket.",
    "I want to know who attended the meeting.",
    "Can you tell me where parcels go?",
    "Could you help me understand clause 7?",
    "Thanks! And when does it end?",
    "What is the title of the report?",
    "What is the name of the conversation course?",
    "What is the pass key? The pass key is",
    "Was muss ich tun, wenn ich krank werde?",
    "Nenne mir die Kündigungsfrist.",
    "What was the message of the president?",
    "Are you allowed to bring dogs?",
    "More about the CP-60 warranty",
    "Explain this error: E7",
    "Put the dates of the meetings in a table",
    "What did she say in the letter?",
    "Is that in the contract?",
    "Who are you calling for emergencies at Weaver House?",
]


@pytest.mark.parametrize("message", CHAT)
def test_chat_turns_ask_nothing(message: str) -> None:
    assert not asks(message)


@pytest.mark.parametrize("message", QUESTIONS)
def test_questions_ask_something(message: str) -> None:
    assert asks(message)


RENT = "How much is the monthly rent of Weaver House now?"
BACKGROUND = "We moved to a new desk system last week and everybody is still unpacking boxes."
PASTED = (
    "> From the archive: the committee met twice.\n> Was the vote counted?\n> It was not.\n"
    "> The chairman went home."
)
REPORT = (
    "Quarterly notes. The sales team travelled to Lisbon in spring. Two fairs were visited, and "
    "forty new contacts were made. The next fair takes place in autumn."
)
CODE = "```\nfor row in rows:\n    print(row)  # why?\n```"
MESSAGES = [
    f"{RENT}",
    f"Hello there! {RENT}",
    f"Dear Anna,\n\n{RENT}\n\nBest regards,\nTom Miller\nAccounting",
    f"Hi team,\n{RENT}\nThanks,\nJo",
    f"{RENT}\n--\nPeter Brown\nHead of sales\n+44 20 555 0100",
    f"{RENT}\n\nSent from my iPhone",
    f"Can you help me? {RENT}",
    f"Quick question: {RENT}",
    f"I have a question. {RENT}",
    f"{BACKGROUND} {RENT}",
    f"{REPORT}\n\n{RENT}",
    f"{PASTED}\n\n{RENT}",
    f"{RENT}\n\n{PASTED}",
    f"{CODE}\n{RENT}",
    f"On 4 March 2026, Anna wrote:\n{PASTED}\n\n{RENT}",
    f"I am writing a summary for the board. {RENT} {BACKGROUND}",
    f"Hello,\n\n{BACKGROUND}\n\n{RENT}\n\nKind regards,\nSue",
    f"Guten Tag,\n\n{RENT}\n\nMit freundlichen Grüßen\nTom",
    f"Hi Lisa, hope you are well. {RENT} Cheers, Bob",
    f"{RENT}\n\nAsking because a customer in Bristol wrote to us this morning.",
    f"A customer in Bristol wrote to us this morning. He is rather angry. {RENT}",
    f"{RENT}\n\n> Am 3. Mai schrieb Karl:\n> Die Pumpe ist kaputt. Was nun?",
    f'```\nTraceback:\n  File "x.py", line 3\nValueError: what?\n```\n{RENT}',
    f"Ok so here's the thing. We sold three pumps last year. {RENT}",
    f"Dear Sir,\n\nI bought one of your pumps in March.\n\n{RENT}\n\nYours faithfully,\nJ.",
    f"{RENT} 😀",
    f"Two tenants left in spring.\n{RENT}\nOne of them owes us a key.",
    f"Hi all, welcome to the new channel! {RENT}",
]


@pytest.mark.parametrize("message", MESSAGES)
def test_query_is_the_question_of_a_message(message: str) -> None:
    assert query_of(message).removeprefix("Quick question: ") == RENT


@pytest.mark.parametrize(
    ("message", "query"),
    [
        ("rent weaver house", "rent weaver house"),
        ("Tell me about the schooner Nantasket.", "Tell me about the schooner Nantasket."),
        (
            f"{BACKGROUND} Tell me about the schooner Nantasket.",
            "Tell me about the schooner Nantasket.",
        ),
        (
            "The tenant lives in Weaver House. How much is his rent?",
            "The tenant lives in Weaver House. How much is his rent?",
        ),
        ("Who is the landlord? And when does the lease end?",) * 2,
        ("What is the pass key? The pass key is",) * 2,
        ("Wie hoch ist das Tagegeld? Danke!", "Wie hoch ist das Tagegeld?"),
        (
            "Hallo zusammen,\nich schreibe gerade den Bericht. Wie hoch ist das Tagegeld?",
            "Wie hoch ist das Tagegeld?",
        ),
        ("", ""),
        ("Hi", "Hi"),
    ],
)
def test_query_keeps_what_a_question_needs(message: str, query: str) -> None:
    assert query_of(message) == query


def test_long_messages_are_read_in_bounded_time() -> None:
    for piece in ("a ", "hi ", "? ", "make it ", "> x\n", "Thanks,\n", "```\n", "please "):
        message = piece * (1 << 20)
        asks(message)
        query_of(message)


@pytest.mark.parametrize(
    "before, question, meant",
    [
        ("How heavy is the CP-40?", "And of the CP-60?", "How heavy is the CP-60?"),
        ("What is the power of the CP-40?", "And of the CP-60?", "What is the power of the CP-60?"),
        ("What does error E1 of it mean?", "What about E3?", "What does error E3 of it mean?"),
        ("How many people work in Lyon?", "And in Leeds?", "How many people work in Leeds?"),
        ("When did he leave Boston?", "And Gloucester?", "When did he leave Gloucester?"),
        ("What are the ribs of it made of?", "and the keel?", "and the keel?"),
        ("Where is the red kettle?", "And the grey ladder?", "And the grey ladder?"),
        ("Who leads the Leeds office?", "What about Lyon?", "Who leads the Lyon office?"),
        ("How heavy is it?", "And CP-60?", "And CP-60?"),
        ("Where was he born?", "And when?", "And when?"),
        ("Where was he born?", "And how old was he then?", "And how old was he then?"),
        ("", "And of the CP-60?", "And of the CP-60?"),
        ("How heavy is it?", "Who made the CP-60?", "Who made the CP-60?"),
    ],
)
def test_a_follow_up_about_another_thing_is_resolved_to_a_full_question(
    before: str, question: str, meant: str
) -> None:
    assert resolved(question, before) == meant


def test_a_short_question_or_one_with_a_pronoun_needs_the_question_before_it() -> None:
    assert leans("How loud is it?") and leans("On which day?")
    assert leans("And which ship did he own after that?") and leans("And the grey old ladder?")
    assert not leans("What is the power consumption of the CP-60?")
