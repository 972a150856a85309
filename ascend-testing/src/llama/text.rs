//! Text to tokens and back: byte pairs merged in the order of a vocabulary, as GPT-2 does it.

use std::collections::HashMap;

/// Words that tokens stand for, and which neighbours are merged first.
pub struct Vocabulary {
    words: Vec<String>,
    tokens: HashMap<String, u32>,
    /// `left right`, by rank.
    merges: HashMap<String, usize>,
}

impl Vocabulary {
    pub fn new(words: Vec<String>, merges: &[String]) -> Self {
        let tokens = words.iter().enumerate();
        let merges = merges.iter().enumerate();
        Self {
            tokens: tokens.map(|(token, word)| (word.clone(), token as u32)).collect(),
            merges: merges.map(|(rank, merge)| (merge.clone(), rank)).collect(),
            words,
        }
    }

    pub fn size(&self) -> usize {
        self.words.len()
    }

    /// The tokens of a text. Words begin with the space in front of them; punctuation, digits and letters are not
    /// merged with each other.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let kind = |c: char| match c {
            c if c.is_alphabetic() => 0,
            c if c.is_numeric() => 1,
            c if c.is_whitespace() => 2,
            _ => 3,
        };
        let mut words: Vec<String> = Vec::new();
        let mut before: Option<char> = None;
        for c in text.chars() {
            let joins = match before {
                Some(' ') => kind(c) != 2,
                // Digits stand alone.
                Some(before) => kind(before) == kind(c) && kind(c) != 1,
                None => false,
            };
            match words.last_mut().filter(|_| joins) {
                Some(word) => word.push(c),
                None => words.push(c.into()),
            }
            before = Some(c);
        }
        words.iter().flat_map(|word| self.merge(word)).collect()
    }

    fn merge(&self, word: &str) -> Vec<u32> {
        let mut parts: Vec<String> = word.bytes().map(|byte| letter(byte).into()).collect();
        loop {
            let pairs = parts.windows(2).enumerate();
            let ranked = pairs.filter_map(|(at, pair)| {
                let rank = self.merges.get(&pair.join(" "))?;
                Some((*rank, at))
            });
            let Some((_, at)) = ranked.min() else {
                break;
            };
            let right = parts.remove(at + 1);
            parts[at].push_str(&right);
        }
        let known = parts.iter().filter_map(|part| self.tokens.get(part));
        known.copied().collect()
    }

    pub fn decode(&self, tokens: &[u32]) -> String {
        let letters = tokens.iter().flat_map(|token| self.words[*token as usize].chars());
        let bytes: Vec<u8> = letters.filter_map(|c| (0..=u8::MAX).find(|byte| letter(*byte) == c)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The character that stands for a byte in a vocabulary: itself where it can be seen, one behind Latin-1 otherwise.
fn letter(byte: u8) -> char {
    let seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..);
    if seen(byte) {
        return char::from(byte);
    }
    let hidden = (0..byte).filter(|byte| !seen(*byte)).count();
    char::from_u32(256 + hidden as u32).unwrap_or(char::REPLACEMENT_CHARACTER)
}
