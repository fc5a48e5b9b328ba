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
    "puppet/marionette stove/oven armour/mail tool/implement bracelet/bangle rifle/musket "
    "hanging/tapestry harp/lyre organ/harmonium drum/tambourine trumpet/bugle rucksack/knapsack "
    "pouch/satchel toolbox/kit script/manuscript novel/romance booklet/pamphlet note/memo "
    "ticket/voucher receipt/invoice bill/banknote cheque/draft portrait/likeness sketch/drawing "
    "vase/amphora basin/bowl kettle/teapot chalice/goblet ladle/spoon fork/pitchfork cloth/fabric "
    "garment/frock cloak/cape sandal/slipper sock/stocking belt/girdle ring/signet brooch/pin "
    "stud/earring watch/chronometer compass/sextant lens/magnifier microscope/eyepiece "
    "bullet/cartridge bomb/grenade arrow/dart bow/crossbow shield/buckler whip/lash chain/fetter "
    "anchor/grapnel sail/canvas oar/paddle canoe/kayak ferry/steamer yacht/sloop tractor/plough "
    "lorry/truck omnibus/bus tram/streetcar locomotive/train sledge/sleigh pram/buggy tyre/wheel "
    "battery/accumulator screw/bolt nail/spike chisel/gouge rake/hoe thread/yarn needle/bodkin "
    "dress/garb button/fastener bedding/mattress wardrobe/closet shelf/ledge stool/footrest "
    "bench/pew cradle/crib fridge/icebox heater/radiator broom/besom mop/sponge soap/detergent "
    "comb/hairbrush razor/shaver perfume/cologne powder/dust ointment/salve tablet/pill "
    "elixir/potion poison/venom dinner/supper sausage/frankfurter pudding/custard biscuit/cookie "
    "sweets/candy wine/claret liquor/brandy toy/plaything doll/figurine kite/glider ball/sphere "
    "medal/medallion idol/effigy shrine/altar coffin/casket headstone/gravestone "
    "document/certificate will/testament pact/treaty riddle/puzzle rumour/gossip reverie/dream"
)
PLACES = _pairs(
    "house/dwelling road/street forest/woods shop/store hill/mound lake/pond church/chapel "
    "prison/jail hotel/inn harbour/port meadow/pasture tomb/grave tavern/pub creek/stream "
    "cottage/hut castle/fortress palace/mansion school/academy hospital/infirmary cave/cavern "
    "swamp/marsh valley/vale mountain/peak cliff/precipice beach/shore island/isle "
    "cellar/basement attic/loft tower/spire barn/shed bridge/viaduct tunnel/passageway "
    "theatre/playhouse museum/gallery market/bazaar monastery/abbey cemetery/graveyard "
    "village/hamlet square/plaza path/trail orchard/grove dock/pier lighthouse/beacon "
    "office/bureau quarry/pit canal/waterway warehouse/depot apartment/flat restaurant/diner "
    "parlour/lounge farm/homestead avenue/boulevard alley/lane highway/motorway pavement/sidewalk "
    "roundabout/circle field/paddock lawn/turf hedge/shrubbery jungle/rainforest desert/wasteland "
    "prairie/plain ravine/gorge waterfall/cascade spring/fountain river/torrent sea/ocean "
    "bay/cove lagoon/inlet volcano/crater plateau/tableland summit/crest city/metropolis "
    "suburb/outskirts district/neighbourhood county/shire kingdom/realm frontier/border "
    "camp/bivouac fort/stronghold barracks/garrison arsenal/armoury embassy/consulate "
    "parliament/senate courthouse/tribunal university/college kindergarten/nursery factory/works "
    "mine/colliery smithy/forge mill/granary butchery/slaughterhouse stable/mews kennel/doghouse "
    "coop/henhouse beehive/apiary hothouse/greenhouse garden/backyard playground/schoolyard "
    "arena/stadium bar/saloon café/coffeehouse canteen/mess kitchen/galley bedroom/bedchamber "
    "bathroom/washroom hallway/corridor staircase/stairwell balcony/veranda roof/rooftop "
    "garage/carport porch/portico airport/aerodrome station/terminus wharf/quay bank/exchange "
    "clinic/sanatorium asylum/madhouse temple/sanctuary mosque/minaret cathedral/basilica "
    "convent/nunnery vault/crypt relic/ruin"
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
    "shopkeeper/storekeeper fisherman/angler husband/bridegroom mother/mum father/dad "
    "sibling/brother aunt/auntie niece/nephew bachelor/suitor widow/dowager heir/successor "
    "prince/princeling queen/empress duke/nobleman knight/cavalier squire/landowner "
    "peasant/rustic shepherd/herdsman milkmaid/dairymaid miller/grinder baker/breadmaker "
    "butcher/meatman carpenter/joiner mason/bricklayer smith/metalworker weaver/spinner "
    "cobbler/shoemaker jeweller/goldsmith printer/typesetter bookseller/stationer pedlar/hawker "
    "landlord/innkeeper waiter/steward nurse/medic surgeon/operator chemist/apothecary "
    "architect/planner technician/engineer mechanic/repairman inventor/creator "
    "explorer/discoverer admiral/commodore general/commander corporal/sergeant bowman/archer "
    "horseman/rider hunter/huntsman poacher/trespasser bootlegger/smuggler buccaneer/pirate "
    "housebreaker/burglar swindler/fraudster captive/hostage prisoner/convict hangman/executioner "
    "mayor/burgomaster senator/lawmaker envoy/ambassador messenger/courier clerk/scribe "
    "reporter/journalist novelist/storyteller editor/reviser critic/reviewer composer/songwriter "
    "instrumentalist/musician dancer/ballerina clown/jester juggler/acrobat gambler/bettor "
    "athlete/sportsman pugilist/boxer swimmer/diver rival/competitor partner/associate "
    "tenant/lodger colleague/workmate bishop/prelate nun/sister preacher/parson prophet/seer "
    "martyr/saint pagan/heathen giant/ogre dwarf/gnome fairy/pixie dragon/wyvern wolf/coyote "
    "fox/vixen bear/grizzly lion/lioness ape/monkey mouse/rodent goat/billy calf/heifer "
    "hen/pullet duck/drake goose/gander pigeon/dove hawk/falcon parrot/cockatoo turtle/tortoise "
    "lizard/gecko worm/grub scarab/beetle fly/gnat spider/tarantula bee/bumblebee"
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
    "abandoned/deserted borrowed/loaned respected/esteemed angular/pointed blazing/burning "
    "bleak/dismal blurred/indistinct bold/daring tedious/boring brittle/crumbly bulky/massive "
    "bumpy/uneven hectic/busy careful/cautious careless/negligent charming/delightful "
    "clumsy/awkward complete/entire complex/complicated confused/bewildered "
    "conspicuous/noticeable lunatic/crazy curious/inquisitive damaged/impaired daft/dumb "
    "dear/beloved rotten/decayed decorated/adorned deep/profound defiant/rebellious devout/pious "
    "different/dissimilar difficult/tricky dim/faint dishonest/deceitful neglected/disused "
    "double/twofold dreadful/horrible dry/arid early/premature effortless/easy "
    "eminent/distinguished eternal/everlasting wicked/evil exact/precise loyal/faithful "
    "false/untrue unafraid/fearless fruitful/fertile fierce/ferocious final/last first/initial "
    "forbidden/prohibited fresh/unspoiled friendly/amiable full/filled funny/amusing gentle/mild "
    "glittering/sparkling gorgeous/stunning greasy/oily harmless/innocuous harsh/severe "
    "hasty/hurried healthy/well hollow/concave homeless/vagrant hopeless/despairing "
    "moronic/idiotic illegal/unlawful important/significant impossible/unfeasible inner/interior "
    "intact/undamaged invisible/unseen itchy/prickly jolly/jovial juicy/succulent lame/limping "
    "lean/skinny lengthy/long loose/slack shallow/low sumptuous/luxurious magnificent/splendid "
    "main/central marvellous/wonderful mean/stingy medieval/mediaeval ruthless/merciless "
    "messy/untidy mighty/potent wretched/miserable moist/dank mournful/sorrowful murky/turbid "
    "mysterious/enigmatic naked/bare mischievous/naughty near/nearby neat/tidy unfeeling/numb "
    "obedient/dutiful evident/obvious outer/external painful/aching forbearing/patient "
    "quirky/peculiar perfect/flawless playful/frolicsome pleasant/agreeable valuable/precious "
    "attractive/pretty private/personal prompt/punctual unpolluted/pure puzzled/perplexed "
    "raw/uncooked ready/prepared reckless/foolhardy ridiculous/absurd roomy/spacious "
    "mouldy/rotting rural/countryside safe/secure salty/briny savage/barbaric serious/earnest "
    "shabby/scruffy silken/satiny simple/uncomplicated adept/skilful slick/slippery slow/sluggish "
    "sly/cunning surplus/spare stale/musty stiff/inflexible stormy/tempestuous straight/unbending "
    "abrupt/sudden sunken/submerged superb/excellent swollen/bloated talkative/chatty "
    "tangled/knotted tattered/threadbare affectionate/tender awful/terrible thick/dense "
    "tight/snug treacherous/disloyal twisted/contorted ultimate/supreme unknown/unidentified "
    "unripe/immature upset/distressed urgent/pressing useful/handy useless/worthless vague/hazy "
    "vain/conceited vast/immense vicious/malicious violent/brutish warm/lukewarm "
    "watchful/vigilant watery/diluted weird/bizarre wicker/rattan meandering/winding "
    "withered/shrivelled zealous/fervent crimson/ruby jet/ebony snowy/ivory amber/ochre"
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
