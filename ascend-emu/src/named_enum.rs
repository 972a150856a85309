//! Enumerations whose variants have names that messages and variables give them.

/// Defines an enumeration with a name for each variant: `ALL` lists them, `name` names one, and `FromStr` finds it by
/// its name.
macro_rules! named_enum {
    (
        $(#[$meta:meta])*
        $visibility:vis enum $name:ident {
            $( $(#[$doc:meta])* $variant:ident $(= $number:literal)? => $text:literal, )*
        }
    ) => {
        $(#[$meta])*
        $visibility enum $name {
            $( $(#[$doc])* $variant $(= $number)?, )*
        }

        impl $name {
            /// Every variant, in the order of their declaration.
            $visibility const ALL: &'static [$name] = &[$( $name::$variant ),*];

            /// The name that messages and environment variables have for it, not Rust's.
            $visibility fn name(self) -> &'static str {
                match self {
                    $( $name::$variant => $text, )*
                }
            }
        }

        impl std::str::FromStr for $name {
            type Err = ();

            fn from_str(name: &str) -> Result<Self, ()> {
                let mut all = $name::ALL.iter().copied();
                all.find(|one| one.name() == name).ok_or(())
            }
        }
    };
}
pub(crate) use named_enum;
