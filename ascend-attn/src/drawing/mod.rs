//! Pictures of rectangles and texts, as files of every format.

mod png_file;
mod svg_file;

use std::path::Path;

use ascend_attention::case;

use crate::Stop;

/// Red, green, blue.
pub(crate) type Colour = [u8; 3];

/// A picture of `width` by `height` dots on white.
pub(crate) struct Scene {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) boxes: Vec<Box>,
    pub(crate) texts: Vec<Text>,
}

/// A filled rectangle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Box {
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) colour: Colour,
}

/// One line of text; `y` is its middle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Text {
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) anchor: Anchor,
    pub(crate) size: Size,
    pub(crate) text: String,
}

/// The point of a text that `x` is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// Heights of letters: the first is for numbers at the edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    Small,
    Large,
}

impl Size {
    /// Width and height of a letter, in dots.
    pub(crate) const fn letter(self) -> (u32, u32) {
        match self {
            Self::Small => (7, 13),
            Self::Large => (9, 15),
        }
    }
}

/// Writes a picture as PNG and as SVG, where there are files for them.
pub(crate) fn write(scene: &Scene, [png, svg]: [Option<&Path>; 2]) -> Result<(), Stop> {
    let write =
        |file: &Path, bytes: &[u8]| case::write_file(file, bytes).map_err(|error| Stop::Trouble(error.to_string()));
    if let Some(file) = svg {
        write(file, svg_file::text(scene).as_bytes())?;
    }
    if let Some(file) = png {
        let bytes = png_file::bytes(scene);
        write(file, &bytes.map_err(|error| Stop::Trouble(format!("{}: {error}", file.display())))?)?;
    }
    Ok(())
}
