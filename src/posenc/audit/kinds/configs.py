"""Kinds of findings: a configuration whose position keys are unread, missing or in conflict."""

from __future__ import annotations

from posenc.audit.findings import Kind

UNREAD = Kind(
    "config-unread",
    "warning",
    "A position key that nothing reads",
    "What the key asks for does not happen, and no message says so.",
    "Write it in the key that the architecture reads, or remove it.",
)
LEGACY = Kind(
    "config-legacy",
    "warning",
    "A key of another or an older convention",
    "Readers that do not know the name skip it: the base or the scaling that it stands for is lost.",
    "Write what it stands for in rope_theta and rope_parameters.",
)
CONFLICT = Kind(
    "config-conflict",
    "error",
    "Two keys that say different things",
    "Readers take different ones, so the same weights get different positions.",
    "Keep the value that the model was trained with and remove the other.",
)
MISSING = Kind(
    "config-missing",
    "error",
    "A required key is absent",
    "A reader stops, or guesses a value that the model was not trained with.",
    "Add the value that the model was trained with.",
)
DEFAULTED = Kind(
    "config-defaulted",
    "note",
    "A key that the file leaves to a default",
    "The default belongs to a class, not to the weights: another reader may have another one.",
    "Write the value into the file.",
)
FACTOR = Kind(
    "config-factor",
    "warning",
    "A scaling factor that does not fit",
    "Some readers take the factor, others the ratio of the lengths: their frequencies and amplitudes differ.",
    "Set max_position_embeddings to factor × original_max_position_embeddings, or correct the factor.",
)
LENGTHS = Kind(
    "config-lengths",
    "warning",
    "Lengths that contradict each other",
    "The scaling counts from the wrong length, or promises tokens that it does not reach.",
    "original_max_position_embeddings is the length of training, max_position_embeddings the length promised.",
)
HEAD_DIM = Kind(
    "config-head-dim",
    "note",
    "A head width that must be guessed",
    "Frequencies are spread over the head's width: with another width every pair but the first is wrong.",
    "Write head_dim into the file.",
)
DROPPED = Kind(
    "config-scaling-dropped",
    "warning",
    "Scaling that is not applied",
    "The model runs with its unscaled frequencies: short texts pass, long ones do not.",
    "Use a rule and a key that the architecture reads, or remove the scaling.",
)
TWICE = Kind(
    "config-scaling-twice",
    "warning",
    "Scaling that is said twice",
    "A reader of one key scales once, a reader of both twice; none of them says which.",
    "Keep one of the two.",
)
TEMPERATURE = Kind(
    "config-temperature",
    "warning",
    "A temperature that counts twice, or not as meant",
    "The amplitude multiplies queries and keys, so scores scale by its square; what also multiplies the softmax scale comes on top.",
    "Keep the temperature in one place: attention_factor, or mscale with mscale_all_dim.",
)
SECTIONS = Kind(
    "config-sections",
    "error",
    "Sections that do not fit the rotating pairs",
    "Pairs read the wrong axis: text is fine, pictures are not.",
    "Give one entry per axis that together make half of the rotary width, in the layout that the architecture has.",
)
LISTS = Kind(
    "config-lists",
    "error",
    "Factor lists that do not fit the rotating pairs",
    "Every pair has a divisor of its own: a list of another length belongs to another model, or another rotary width.",
    "Give one number above 0 per rotating pair in short_factor and in long_factor.",
)
SWAPPED = Kind(
    "config-swapped",
    "error",
    "Two values that stand in each other's place",
    "Fast pairs are divided and slow ones kept, or short texts take the stretched frequencies: the opposite of the rule.",
    "Swap them.",
)
ROPE_TYPE = Kind(
    "config-rope-type",
    "error",
    "A rope_type that nobody has",
    "Readers stop, or warn once and rotate without scaling.",
    "Write one of default, linear, dynamic, yarn, longrope, llama3, proportional.",
)
TYPE = Kind(
    "config-type",
    "error",
    "A value of the wrong kind",
    "A text, a number or a switch where an object or a number belongs is refused, or cast to something that was not meant.",
    "Write the value as JSON has it, without quotes around objects and numbers.",
)
LAYERS = Kind(
    "config-layers",
    "warning",
    "Layers and what is said of them do not match",
    "Layers attend or turn in another way than the weights were trained for.",
    "Give one entry per layer, and a window to the layers that slide.",
)
READER = Kind(
    "config-reader",
    "warning",
    "Readers that get other frequencies",
    "The same file is another model for them; both run without a message.",
    "Write the keys of both versions side by side with the same values.",
)
LENGTH_RULE = Kind(
    "config-length-rule",
    "note",
    "Frequencies that change with the length in use",
    "Keys in a cache keep the frequencies of the moment they were written; a longer sequence in a batch changes the others.",
    "Keep one length per cache, or rotate keys when they are read.",
)
ARCHITECTURE = Kind(
    "config-architecture",
    "note",
    "What the architecture does and no key says",
    "A reader that goes by the keys alone does not know it.",
    "Nothing in the file; know it when you convert or reimplement the model.",
)
REFUSED = Kind(
    "config-refused",
    "error",
    "A configuration that cannot be read",
    "No rotation follows from it.",
    "Mend the key that is named.",
)
