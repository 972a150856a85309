//! The function table as plain data.

macro_rules! define {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        /// One optional pointer for every function of the C ABI.
        ///
        /// An implementation of the ABI fills the table and passes it to
        /// [`Api::from_functions`](crate::Api::from_functions); a function that it leaves out is a
        /// [`MissingSymbol`](crate::MissingSymbol) there.
        #[derive(Clone, Default)]
        #[allow(non_snake_case, reason = "the names are those of the C functions")]
        pub struct Functions {
            $(
                #[doc = concat!("Pointer to `", stringify!($name), "`.")]
                pub $name: Option<unsafe extern "C" fn($( $argument: $type ),*) -> $result>,
            )*
        }

        impl Functions {
            /// Names of the functions present.
            pub fn names(&self) -> impl Iterator<Item = &'static str> {
                [$( self.$name.is_some().then_some(stringify!($name)) ),*].into_iter().flatten()
            }
        }
    };
}

for_each_function! { define }

impl std::fmt::Debug for Functions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.names()).finish()
    }
}
