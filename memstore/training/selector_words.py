"""Words that facts for selectors are made of: synonym pairs, names, colours, attributes.

A word occurs in one pair only, so that a pair is wholly of one split (selector_questions.split).
"""


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(tuple(pair.split("/", 1)) for pair in text.split())  # type: ignore[misc]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


THINGS = _pairs(
    "ship/vessel car/automobile stone/rock picture/painting coat/jacket sofa/couch bucket/pail "
    "carpet/rug bag/sack cup/mug hat/cap tale/story present/gift engine/motor sword/blade "
    "spectacles/glasses pistol/gun lamp/lantern curtain/drape statue/sculpture diary/journal "
    "feast/banquet aeroplane/aircraft bicycle/bike fence/barrier box/crate rope/cord "
    "letter/missive medicine/remedy book/tome jewel/gem necklace/pendant shirt/blouse "
    "trousers/pants shoe/boot table/desk chair/seat cupboard/cabinet bed/cot pan/skillet "
    "plate/dish bottle/flask basket/hamper blanket/quilt pillow/cushion clock/timepiece "
    "violin/fiddle song/melody poem/verse map/chart lock/latch axe/hatchet hammer/mallet "
    "knife/dagger spear/lance shovel/spade wagon/cart carriage/coach boat/dinghy candle/taper "
    "cigar/cheroot wallet/purse trunk/suitcase telescope/spyglass machine/device radio/wireless "
    "film/movie newspaper/gazette photograph/snapshot parcel/package flag/banner crown/diadem "
    "robe/gown scarf/shawl glove/mitten apron/smock barrel/cask jar/urn stick/cane "
    "contract/agreement cake/pastry soup/broth stew/casserole bread/loaf handkerchief/kerchief "
    "puppet/marionette stove/oven armour/mail tool/implement bracelet/bangle rifle/musket"
)
PLACES = _pairs(
    "house/dwelling road/street forest/woods shop/store hill/mound lake/pond church/chapel "
    "prison/jail hotel/inn harbour/port meadow/pasture tomb/grave tavern/pub creek/stream "
    "cottage/hut castle/fortress palace/mansion school/academy hospital/infirmary cave/cavern "
    "swamp/marsh valley/vale mountain/peak cliff/precipice beach/shore island/isle cellar/basement "
    "attic/loft tower/spire barn/shed bridge/viaduct tunnel/passageway theatre/playhouse "
    "museum/gallery market/bazaar monastery/abbey cemetery/graveyard village/hamlet square/plaza "
    "path/trail orchard/grove dock/pier lighthouse/beacon office/bureau quarry/pit canal/waterway "
    "warehouse/depot apartment/flat restaurant/diner parlour/lounge farm/homestead"
)
BEINGS = _pairs(
    "doctor/physician child/kid boy/lad girl/lass king/monarch teacher/instructor soldier/warrior "
    "thief/robber lawyer/attorney sailor/mariner infant/baby priest/clergyman dog/hound pig/hog "
    "rabbit/hare snake/serpent horse/steed woman/lady man/gentleman friend/companion enemy/foe "
    "traveller/wanderer cook/chef guard/sentry policeman/constable judge/magistrate writer/author "
    "poet/bard painter/artist singer/vocalist actor/performer servant/butler merchant/trader "
    "beggar/pauper captain/skipper pilot/aviator spy/informer scholar/academic "
    "scientist/researcher magician/wizard witch/sorceress ghost/phantom monk/friar cat/feline "
    "donkey/mule ox/bullock rooster/cockerel frog/toad driver/chauffeur fool/simpleton "
    "leader/chief worker/labourer guest/visitor professor/lecturer detective/investigator "
    "barber/hairdresser murderer/killer orphan/foundling grandmother/granny tailor/dressmaker "
    "shopkeeper/storekeeper fisherman/angler"
)
QUALITIES = _pairs(
    "big/large small/tiny old/ancient fast/quick rich/wealthy sad/unhappy happy/glad clever/smart "
    "angry/furious quiet/silent strange/odd brave/courageous dirty/filthy wet/damp "
    "broken/shattered empty/vacant famous/renowned dangerous/perilous beautiful/lovely "
    "ugly/hideous strong/powerful sick/ill lazy/idle thin/slender fat/plump hidden/concealed "
    "costly/expensive dark/gloomy bright/shiny new/modern holy/sacred stolen/pilfered frozen/icy "
    "loud/noisy weary/tired crooked/bent round/circular scarlet/red wooden/timber golden/gilded "
    "azure/blue emerald/green pale/pallid tall/lofty narrow/cramped wide/broad heavy/weighty "
    "cold/chilly hot/scorching soft/downy hard/rigid sharp/keen smooth/polished rough/coarse "
    "clean/spotless sweet/sugary bitter/sour sleepy/drowsy hungry/starving drunk/intoxicated "
    "cruel/brutal kind/benevolent honest/truthful proud/haughty humble/modest polite/courteous "
    "shy/timid cheerful/merry lonely/solitary crowded/packed secret/clandestine foreign/alien "
    "wild/untamed dead/deceased blind/sightless bald/hairless hairy/shaggy young/youthful "
    "elderly/aged foolish/silly mad/insane jealous/envious greedy/avaricious generous/charitable "
    "stubborn/obstinate nervous/anxious calm/serene frightened/scared noble/aristocratic "
    "poor/needy lost/missing ruined/wrecked burnt/charred torn/ripped patched/mended "
    "striped/streaked spotted/speckled even/level steep/sheer muddy/boggy dusty/grimy "
    "rusty/corroded sunny/sunlit foggy/misty royal/regal magic/enchanted haunted/ghostly "
    "lucky/fortunate rare/uncommon common/ordinary cheap/inexpensive fake/counterfeit "
    "genuine/authentic gigantic/enormous transparent/clear sticky/gluey fragrant/scented "
    "stinking/smelly tasty/delicious poisonous/toxic sturdy/robust fragile/delicate "
    "abandoned/deserted borrowed/loaned respected/esteemed"
)
FIRST_NAMES = _names(
    "Agnes, Albert, Amelia, Arthur, Beatrice, Bernard, Cecily, Clara, Conrad, Daphne, Edgar, "
    "Edith, Elias, Ernest, Esther, Eugene, Felix, Flora, Gilbert, Gloria, Harold, Hector, Helga, "
    "Ingrid, Irene, Ivan, Jasper, Joan, Julius, Karen, Laura, Leopold, Lydia, Magnus, Martha, "
    "Maurice, Miriam, Nora, Norman, Olga, Oscar, Otto, Pamela, Percy, Rachel, Ralph, Rosa, Rufus, "
    "Selma, Simon, Stella, Sylvia, Theodore, Ursula, Vera, Victor, Walter, Wilfred, Winifred, "
    "Yusuf"
)
LAST_NAMES = _names(
    "Abbott, Ashworth, Baines, Barlow, Becker, Bramley, Calloway, Carver, Corbin, Dalton, "
    "Drummond, Ellery, Fairfax, Farrow, Fenwick, Forsyth, Garrick, Grimshaw, Hadley, Hollis, "
    "Ibsen, Jarvis, Kendrick, Kowalski, Langley, Lindgren, Lockwood, Marlowe, Mercer, Moreau, "
    "Nakamura, Novak, Oakley, Okafor, Pemberton, Petrov, Prescott, Quill, Radcliffe, Ramsey, "
    "Rossi, Sandoval, Sawyer, Schmidt, Stanton, Tanaka, Thorne, Tolliver, Underhill, Vance, "
    "Varga, Wakefield, Whitlock, Yardley, Zimmer"
)
TOWNS = _names(
    "Alton, Arundel, Bergen, Bristol, Calais, Cardiff, Cordoba, Delft, Dover, Dresden, Exeter, "
    "Galway, Geneva, Genoa, Ghent, Harwich, Havana, Kyoto, Leipzig, Lisbon, Lyon, Malaga, "
    "Nairobi, Nantes, Oslo, Padua, Plymouth, Prague, Quebec, Ravenna, Riga, Salem, Seville, "
    "Smyrna, Tangier, Toledo, Trieste, Tunis, Utrecht, Verona, Vienna, Warsaw, Whitby, York, "
    "Zurich"
)
COLOURS = _names(
    "purple, yellow, orange, white, black, brown, pink, silver, violet, turquoise, beige, maroon, "
    "olive, lilac, navy, cream"
)
MATERIALS = _names(
    "oak, marble, copper, bronze, glass, clay, silk, leather, granite, ivory, pine, wool, bamboo, "
    "iron, wax, tin, linen, brick"
)
GOODS = _names(
    "coffee, salt, tobacco, honey, pepper, tea, cotton, apples, herrings, potatoes, rice, onions, "
    "chocolate, mustard, ginger, vinegar, walnuts, cherries, barley, cinnamon"
)
NUMBER_ATTRIBUTES = _names(
    "number, code, price, weight, height, age, cost, length, width, temperature, score, serial "
    "number, phone number, room number, house number, licence number, balance, salary, rent, "
    "speed, distance, depth, volume, capacity, budget, postal code, ticket number, flight number, "
    "account number, order number, population, year of birth, frequency, voltage, pressure, "
    "quantity, debt, fine, fee, tax, deposit, reward, prize, shoe size, page number, floor, "
    "extension, badge number, rank, duration, value, combination, registration number, toll, "
    "altitude, wage, mileage, radius, dosage, bounty, PIN, track number, locker number, insurance "
    "premium, dose"
)
WORD_ATTRIBUTES = _names(
    "colour, owner, nickname, password, symbol, destination, flavour, hiding place, guardian, "
    "motto, secret ingredient, maker, patron, emblem, architect, codename, inventor, birthplace, "
    "tenant, sponsor, title, label, call sign, landlord, passphrase, favourite food"
)
KEYS = _names(
    "secret number, magic number, door code, lucky number, access code, security code, secret "
    "word, vault code, alarm code, launch code, network password, safe word, hidden number, gate "
    "code, recovery code, entry code, special digit string, master key, room key, cipher, backup "
    "code, keyword, token, answer to the riddle, unlock code, watchword, pass key"
)
LANGUAGES = _names("Polish, Danish, Greek, Turkish, Welsh, Arabic, Dutch, Hindi, Finnish, Basque")
MUSIC = _names(
    "flute, harp, trumpet, organ, cello, guitar, oboe, accordion, banjo, clarinet, mandolin, tuba"
)
ROLES = _names(
    "treasurer, porter, clerk, watchman, cashier, secretary, bookkeeper, foreman, agent, janitor"
)
MONTHS = _names(
    "January, February, March, April, May, June, July, August, September, October, November"
)
