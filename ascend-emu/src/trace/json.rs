//! A writer of one line of JSON.

use std::fmt::Write as _;

/// An object that is being written, its braces and commas included.
#[derive(Debug, Default)]
pub(super) struct Json {
    text: String,
    /// Whether the next value is preceded by another in the same object or array.
    comma: bool,
}

impl Json {
    fn separate(&mut self) {
        if self.comma {
            self.text.push(',');
        }
        self.comma = true;
    }

    /// Writes the name of the next value.
    pub(super) fn key(&mut self, name: &str) -> &mut Self {
        self.string(name);
        self.text.push(':');
        self.comma = false;
        self
    }

    pub(super) fn string(&mut self, value: &str) {
        self.separate();
        self.text.push('"');
        for character in value.chars() {
            let _ = match character {
                '"' | '\\' => write!(self.text, "\\{character}"),
                '\n' => write!(self.text, "\\n"),
                '\u{0}'..='\u{1f}' | '\u{7f}' => write!(self.text, "\\u{:04x}", character as u32),
                _ => write!(self.text, "{character}"),
            };
        }
        self.text.push('"');
    }

    pub(super) fn null(&mut self) {
        self.separate();
        self.text.push_str("null");
    }

    pub(super) fn boolean(&mut self, value: bool) {
        self.separate();
        let _ = write!(self.text, "{value}");
    }

    pub(super) fn integer(&mut self, value: impl Into<i128>) {
        self.separate();
        let _ = write!(self.text, "{}", value.into());
    }

    /// Writes a number as its own type prints it, since 0.1 of single precision is not 0.1 of double precision.
    /// Numbers that are not finite are written as texts, because JSON has none.
    pub(super) fn real(&mut self, value: impl Into<f64> + std::fmt::Debug + Copy) {
        if !value.into().is_finite() {
            return self.string(&format!("{value:?}"));
        }
        self.separate();
        let _ = write!(self.text, "{value:?}");
    }

    /// Writes a number with `digits` digits after the point.
    pub(super) fn fixed(&mut self, value: f64, digits: usize) {
        self.separate();
        let _ = write!(self.text, "{value:.digits$}");
    }

    /// Writes a handle or an address; a null pointer is null.
    pub(super) fn address(&mut self, value: usize) {
        if value == 0 {
            return self.null();
        }
        self.separate();
        let _ = write!(self.text, "\"{value:#x}\"");
    }

    pub(super) fn object(&mut self, fill: impl FnOnce(&mut Self)) {
        self.nested('{', '}', fill);
    }

    pub(super) fn array(&mut self, fill: impl FnOnce(&mut Self)) {
        self.nested('[', ']', fill);
    }

    fn nested(&mut self, open: char, close: char, fill: impl FnOnce(&mut Self)) {
        self.separate();
        self.text.push(open);
        self.comma = false;
        fill(self);
        self.text.push(close);
        self.comma = true;
    }

    /// Writes an array of the first `shown` values, and a text with the number of values left out.
    pub(super) fn bounded<T>(
        &mut self,
        values: impl ExactSizeIterator<Item = T>,
        shown: usize,
        mut one: impl FnMut(&mut Self, T),
    ) {
        self.array(|json| {
            let left_out = values.len().saturating_sub(shown);
            for value in values.take(shown) {
                one(json, value);
            }
            if left_out > 0 {
                json.string(&format!("{left_out} left out"));
            }
        });
    }

    /// Appends the names and values of another object.
    pub(super) fn append(&mut self, other: Json) {
        self.separate();
        self.text.push_str(&other.text);
    }

    /// The finished object as a line, with its line end.
    pub(super) fn into_line(mut self) -> String {
        self.text.push('\n');
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(fill: impl FnOnce(&mut Json)) -> String {
        let mut json = Json::default();
        json.object(fill);
        json.into_line()
    }

    #[test]
    fn texts_of_any_characters_stay_on_one_line() {
        let text = line(|json| json.key("a\"b").string("c\\d\ne\u{1}f é \u{7f}"));
        assert_eq!(text, "{\"a\\\"b\":\"c\\\\d\\ne\\u0001f é \\u007f\"}\n");
    }

    #[test]
    fn values_stand_with_commas_between_them() {
        let text = line(|json| {
            json.key("a").array(|json| {
                json.integer(u64::MAX);
                json.integer(i64::MIN);
                json.object(|json| json.key("x").null());
                json.array(|_| {});
                json.boolean(true);
            });
            json.key("b").address(0xb1);
            json.key("c").address(0);
        });
        assert_eq!(
            text,
            "{\"a\":[18446744073709551615,-9223372036854775808,{\"x\":null},[],true],\"b\":\"0xb1\",\"c\":null}\n"
        );
    }

    #[test]
    fn numbers_are_those_of_json() {
        let text = line(|json| {
            json.key("a").array(|json| {
                json.real(0.1f32);
                json.real(1e300);
                json.real(f64::NAN);
                json.real(f32::NEG_INFINITY);
                json.fixed(2.0 / 3.0, 3);
            });
        });
        assert_eq!(text, "{\"a\":[0.1,1e300,\"NaN\",\"-inf\",0.667]}\n");
    }

    #[test]
    fn a_long_array_says_how_much_it_leaves_out() {
        let text = line(|json| {
            json.key("a").bounded(0..5i32, 3, |json, value| json.integer(value));
        });
        assert_eq!(text, "{\"a\":[0,1,2,\"2 left out\"]}\n");
    }
}
