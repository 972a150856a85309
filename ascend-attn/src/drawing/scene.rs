//! A picture as rectangles and texts, for every file format.

/// Red, green, blue.
pub(super) type Colour = [u8; 3];

/// A picture of `width` by `height` dots on white.
pub(super) struct Scene {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) boxes: Vec<Box>,
    pub(super) texts: Vec<Text>,
}

/// A filled rectangle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Box {
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) colour: Colour,
}

/// One line of text; `y` is its middle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Text {
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) anchor: Anchor,
    pub(super) size: Size,
    pub(super) text: String,
}

/// The point of a text that `x` is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// Heights of letters: the first is for numbers at the edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Size {
    Small,
    Large,
}

impl Size {
    /// Width and height of a letter, in dots.
    pub(super) const fn letter(self) -> (u32, u32) {
        match self {
            Self::Small => (7, 13),
            Self::Large => (9, 15),
        }
    }
}
