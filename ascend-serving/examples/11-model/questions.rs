//! What a model from a file is asked.

/// What all prompts begin with.
pub(crate) const BEGINNING: &str = "\
The following are questions about the world. Each is answered in one short sentence, which is correct, and in which no \
word could be left out. Where the answer is a number, a name or a place, it is that alone.

Question: How many legs has a spider?
Answer: Eight.

Question: What is the largest ocean?
Answer: The Pacific Ocean.

Question: Which metal is liquid at room temperature?
Answer: Mercury.

Question: Who painted the Mona Lisa?
Answer: Leonardo da Vinci.

Question: At how many degrees Celsius does water boil?
Answer: 100.

Question: In which country do kangaroos live?
Answer: Australia.

Question: What is the opposite of hot?
Answer: Cold.

Question: How many minutes has an hour?
Answer: 60.

Question: Which animal is called the king of the desert?
Answer: The camel.

Question: What do plants need to grow?
Answer: Light, water and air.

Question: What is the first letter of the alphabet?
Answer: A.

";

pub(crate) const ASKED: [&str; 4] =
    ["What is the capital of France?", "How many days has a week?", "Who wrote Hamlet?", "What do bees make?"];
